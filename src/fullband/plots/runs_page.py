"""Training runs as one page that opens offline: the numbers, the picture and the tables of `plots.runs`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Any

from fullband.plots.markers import MOST_RUNS
from fullband.plots.page import stylesheet
from fullband.plots.runs import RunRecord, compare, plot_runs

TEMPLATE = Path(__file__).with_name("runs_page.html")


def page(runs: Sequence[RunRecord]) -> str:
    """The page of one run, or of several side by side."""
    found = compare(runs)
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        stylesheet=stylesheet(),
        headline=escape(" and ".join(run.name for run in runs)),
        differing=_differing(found["differing_data"]),
        picture="\n".join(_picture(runs[first : first + MOST_RUNS]) for first in range(0, len(runs), MOST_RUNS)),
        equal=f"{found['equal_compute'] / 1e6:.2f} million",
        at_equal=_rows(_at_equal(run) for run in found["runs"]),
        milestones=_rows(_milestones(run) for run in found["runs"]),
        evaluations=_rows(_evaluation(run["name"], e) for run in found["runs"] for e in run["evaluations"]),
    )


def _differing(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<p><strong>These runs differ in their data: their losses are not of the same text.</strong></p>\n<ul>{items}</ul>"


def losses(by_passes: dict[str, float]) -> str:
    """ "0: 1.6700, 1: 1.6520": held-out loss by feedback passes."""
    return ", ".join(f"{passes}: {loss:.4f}" for passes, loss in by_passes.items())


def _picture(runs: Sequence[RunRecord]) -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "runs.svg"
        plot_runs(runs, [path])
        svg = path.read_text(encoding="utf-8")
    return svg[svg.index("<svg") :]


def _at_equal(run: dict[str, Any]) -> list[str]:
    at_compute, at_tokens = (run[key] for key in ("at_equal_compute", "at_equal_tokens"))
    return [run["name"], *(losses(e["losses"]) if e else "not evaluated until then" for e in (at_compute, at_tokens))]


def _milestones(run: dict[str, Any]) -> list[str]:
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
        "-" if on is None else held_out_crossover(run["evaluations"]),
        losses({key.removeprefix("pass_"): value for key, value in run["training_loss"].items()}),
    ]


def held_out_crossover(evaluations: Sequence[dict[str, Any]]) -> str:
    """The step of the first evaluation from which on held-out loss with feedback passes, at its best number of them, stayed below plain."""
    found = "not evaluated"
    for evaluation in reversed(evaluations):
        fed = [loss for passes, loss in evaluation["losses"].items() if passes != "0"]
        if not fed or "0" not in evaluation["losses"]:
            continue
        if not min(fed) < evaluation["losses"]["0"]:
            return "not yet" if found == "not evaluated" else found
        found = str(evaluation["step"] + 1)
    return found


def _evaluation(name: str, evaluation: dict[str, Any]) -> list[str]:
    return [name, str(evaluation["step"] + 1), f"{evaluation['compute'] / 1e6:.2f}M", losses(evaluation["losses"])]


def _rows(rows: Any) -> str:
    return "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
