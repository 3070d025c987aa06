"""Training runs as one page that opens offline: the numbers, the picture and the tables of `plots.runs`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fullband.plots.markers import MOST_RUNS
from fullband.plots.page import fill
from fullband.plots.runs import RunRecord, compare, held_out_crossover, is_both_ways
from fullband.plots.runs_charts import runs_charts

TEMPLATE = Path(__file__).with_name("runs_page.html")


def page(runs: Sequence[RunRecord]) -> str:
    """The page of one run, or of several side by side."""
    found = compare(runs)
    return fill(
        TEMPLATE,
        headline=escape(" and ".join(run.name for run in runs)),
        differing=_differing(found["differing_data"]),
        charts="\n".join(runs_charts(runs[first : first + MOST_RUNS]) for first in range(0, len(runs), MOST_RUNS)),
        equal=f"{found['equal_compute'] / 1e6:.2f} million",
        at_equal=_rows(_at_equal(run) for run in found["runs"]),
        milestones=_rows(_milestones(run, held_out_words(record)) for run, record in zip(found["runs"], runs, strict=True)),
        evaluations=_rows(_evaluation(run["name"], e) for run in found["runs"] for e in run["evaluations"]),
    )


def _differing(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<p><strong>These runs used different data: their losses are not comparable.</strong></p>\n<ul>{items}</ul>"


def losses(by_passes: dict[str, float]) -> str:
    """ "0: 1.6700, 1: 1.6520": held-out loss by feedback passes."""
    return ", ".join(f"{passes}: {loss:.4f}" for passes, loss in by_passes.items())


def _at_equal(run: dict[str, Any]) -> list[str]:
    evaluations = (run["at_equal_compute"], run["at_equal_tokens"])
    return [run["name"], *(losses(e["losses"]) if e else "not evaluated until then" for e in evaluations)]


def _milestones(run: dict[str, Any], held_out: str) -> list[str]:
    shock, on, crossover = run["switch_on_shock"], run["switch_on_step"], run["crossover_step"]
    return [
        run["name"],
        f"{run['steps']:,}",
        f"{run['tokens'] / 1e6:.2f}M",
        f"{run['token_equivalent_compute'] / 1e6:.2f}M",
        f"{run['executed_positions'] / 1e6:.2f}M",
        "never" if on is None else str(on),
        "-" if shock is None else f"{shock:+.3f}",
        "-" if on is None else "not yet" if crossover is None else str(crossover),
        "-" if on is None else held_out,
        losses({key.removeprefix("pass_"): value for key, value in run["training_loss"].items()}),
    ]


def held_out_words(run: RunRecord) -> str:
    """Steps until feedback paid on held-out loss, as `held_out_crossover` finds them."""
    if not any(is_both_ways(evaluation) for evaluation in run.evaluations):
        return "not evaluated"
    step = held_out_crossover(run.evaluations)
    return "not yet" if step is None else str(step + 1)


def _evaluation(name: str, evaluation: dict[str, Any]) -> list[str]:
    return [name, str(evaluation["step"] + 1), f"{evaluation['compute'] / 1e6:.2f}M", losses(evaluation["losses"])]


def _rows(rows: Any) -> str:
    return "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
