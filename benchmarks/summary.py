"""Markdown tables over seeds, from result files that runs have left.

  python -m benchmarks.summary quickstart results/quickstart/seed-*/result.json
  python -m benchmarks.summary text results/tiny-text/*.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

READINGS = {
    "standard": "standard model",
    "fused-0": "full-band, 0 feedback passes",
    "fused-1": "full-band, 1 pass",
    "fused-4": "full-band, 4 passes",
    "fused-16": "full-band, 16 passes",
    "exact": "full-band, exact",
}


def quickstart_table(results: Sequence[dict[str, Any]]) -> str:
    """Accuracy at each position: mean over seeds (lowest-highest)."""
    positions = list(results[0]["accuracy"]["standard"])
    lines = ["| right at position | " + " | ".join(positions) + " |", "|---|" + "---|" * len(positions)]
    for key, name in READINGS.items():
        cells = []
        for position in positions:
            values = [result["accuracy"][key][position] for result in results]
            cells.append(f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def text_table(results: dict[str, dict[str, Any]]) -> str:
    """Held-out loss of each model by feedback passes: mean ± standard deviation over seeds. Files are named MODEL-seed-N.json."""
    models: dict[str, dict[str, list[float]]] = {}
    for name, result in sorted(results.items()):
        rows = models.setdefault(name.rpartition("-seed-")[0], {})
        for row in result["rows"]:
            rows.setdefault(str(row["feedback_passes"]), []).append(row["loss"])
    lines = ["| model | feedback passes | loss (nats a byte) | seeds |", "|---|---|---|---|"]
    for model, rows in models.items():
        for passes, losses in rows.items():
            spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
            lines.append(f"| {model} | {passes} | {mean(losses):.4f}{spread} | {len(losses)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["quickstart", "text"])
    parser.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args(arguments)
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in given.files}
    if given.kind == "quickstart":
        print(quickstart_table([json.loads(path.read_text(encoding="utf-8")) for path in given.files]))
    else:
        print(text_table(results))


if __name__ == "__main__":
    main()
