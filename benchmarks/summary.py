"""Markdown tables over seeds, from result files that runs have left.

python -m benchmarks.summary quickstart results/quickstart/seed-*/result.json
python -m benchmarks.summary text results/tiny-text/*/metrics.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fullband.training.metrics import read_metrics

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
    lines = ["| accuracy at position | " + " | ".join(positions) + " |", "|---|" + "---|" * len(positions)]
    for key, name in READINGS.items():
        cells = []
        for position in positions:
            values = [result["accuracy"][key][position] for result in results]
            cells.append(f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def text_table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Held-out loss of each model by feedback passes: mean ± standard deviation over seeds, from the last validation of each run's
    metrics. Runs are named MODEL-seed-N."""
    models: dict[str, dict[str, list[float]]] = {}
    compute: dict[str, list[int]] = {}
    for name, entries in sorted(runs.items()):
        model = name.rpartition("-seed-")[0]
        for passes, loss in [entry["validation"] for entry in entries if "validation" in entry][-1].items():
            models.setdefault(model, {}).setdefault(passes, []).append(loss)
        compute.setdefault(model, []).append([e["token_equivalent_compute"] for e in entries if "token_equivalent_compute" in e][-1])
    lines = ["| model | token-equivalent compute | feedback passes | held-out loss (nats a token) | seeds |", "|---|---|---|---|---|"]
    for model, rows in models.items():
        for passes, losses in rows.items():
            spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
            lines.append(f"| {model} | {mean(compute[model]) / 1e6:.2f}M | {passes} | {mean(losses):.4f}{spread} | {len(losses)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["quickstart", "text"])
    parser.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args(arguments)
    if given.kind == "quickstart":
        print(quickstart_table([json.loads(path.read_text(encoding="utf-8")) for path in given.files]))
    else:
        print(text_table({path.parent.name: read_metrics(path) for path in given.files}))


if __name__ == "__main__":
    main()
