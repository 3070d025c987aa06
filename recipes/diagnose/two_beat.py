"""Writes the data of oscillating.yaml: `python recipes/diagnose/two_beat.py`. Seeded, so it writes the same files again.

Letters a to d. Those at even places are mostly a, those at odd places mostly d: what comes next depends on whether the place is even
or odd, which a letter alone hints at and only counting from the document's start tells for sure.
"""

import json
import random
from pathlib import Path

WEIGHTS = (55, 25, 12, 8)


def document(random_: random.Random, length: int) -> str:
    return "".join(random_.choices("abcd" if place % 2 == 0 else "dcba", WEIGHTS)[0] for place in range(length))


def main() -> None:
    random_, folder = random.Random(0), Path(__file__).parent
    for name, count, length in (("train", 2000, 7), ("validation", 16, 127)):  # and the end of the document: 8 and 128 tokens
        lines = [json.dumps({"text": document(random_, length)}) + "\n" for _ in range(count)]
        (folder / f"two-beat-{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
