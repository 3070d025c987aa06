"""Writes the data of oscillating.yaml: `python recipes/diagnose/parity.py`. Seeded, so it writes the same files again.

A document is a walk over the letters a to d, then "=", then e if it had an even number of letters and o if an odd one. Each letter is
likely the one before, so there is something to learn without feedback; but no letter tells how many came before it, so the answer takes a
state that flips at every letter. A document ends after any letter with the same probability: counting further than to two helps nothing.
"""

import json
import random
from pathlib import Path

MEAN, LONGEST = 8, 32  # letters of a training document
LONG = 125  # at least, of a held-out one: with "=", the answer and the end of the document 128 tokens
STAYS = 0.7  # probability that a letter is that before, not counting chance


def document(random_: random.Random, letters: int) -> str:
    walk = [random_.choice("abcd")]
    while len(walk) < letters:
        walk.append(walk[-1] if random_.random() < STAYS else random_.choice("abcd"))
    return "".join(walk) + "=" + "eo"[letters % 2]


def main() -> None:
    random_ = random.Random(0)
    lengths = {
        "train": [min(LONGEST, 1 + int(random_.expovariate(1 / MEAN))) for _ in range(4000)],
        "validation": [LONG + random_.randrange(2) for _ in range(16)],
    }
    for name, letters in lengths.items():
        lines = [json.dumps({"text": document(random_, n)}) + "\n" for n in letters]
        (Path(__file__).parent / f"parity-{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
