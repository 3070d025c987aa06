"""Training runs as one page that opens offline: the numbers of `plots.runs` in tables, and pictures: held-out loss with training in the
background and what is marked there, gradient norms, learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fullband.plots.chart import MOST_RUNS, RUN_MARKERS, Chart, Line, Mark, near_axis, passes_dashes, run_key
from fullband.plots.curves import ROOM, compute_at, compute_axis, millions, steps_html
from fullband.plots.page import fill
from fullband.plots.runs import RunRecord, compare, held_out_crossover, is_both_ways, names_of
from fullband.plots.style import passes_label

TEMPLATE = Path(__file__).with_name("runs_page.html")
MOST_LABELS = 6  # of marks in one picture; with more, the table alone says which is which


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


def runs_charts(runs: Sequence[RunRecord]) -> str:
    """Of MOST_RUNS runs at most: each has its own colour and marker, dashes tell the numbers of feedback passes apart."""
    names = names_of(runs)
    steps = {name: (run_key(number), run.steps) for number, (name, run) in enumerate(zip(names, runs, strict=True))}
    return loss_chart(runs).html() + steps_html(steps)


def loss_chart(runs: Sequence[RunRecord]) -> Chart:
    """Held-out loss by feedback passes over token-equivalent compute; faintly, the smoothed training loss of each pass."""
    evaluated = [list(dict.fromkeys(passes for e in run.evaluations for passes in e.losses)) for run in runs]
    dashes = passes_dashes(list(dict.fromkeys(passes for own in evaluated for passes in own)))
    lines, training = [], []
    for number, (name, run) in enumerate(zip(names_of(runs), runs, strict=True)):
        key, marker = run_key(number), RUN_MARKERS[number]
        training += [Line(key, name, millions(curve.compute), curve.smooth) for curve in run.curves]
        for passes in evaluated[number]:
            held = [e for e in run.evaluations if passes in e.losses]
            compute, losses = millions([e.compute for e in held]), [e.losses[passes] for e in held]
            lines.append(Line(key, f"{name}, {passes_label(passes)}", compute, losses, dash=dashes[passes], marker=marker))
    lines, training = (lines, training) if lines else (training, [])  # runs that were never evaluated: the training loss alone
    marks = marks_of(runs)
    x = compute_axis([*lines, *training], [mark.x for mark in marks if mark.x is not None])
    y = near_axis("loss, nats a token", [value for line in (*lines, *training) for value in line.y], above=ROOM)
    return Chart("Held-out loss by feedback passes", lines, x, y, marks, training)


def marks_of(runs: Sequence[RunRecord]) -> list[Mark]:
    """Where feedback was switched on, where the training loss crossed over, and from where on it paid on held-out loss."""
    found = []
    for number, (name, run) in enumerate(zip(names_of(runs), runs, strict=True)):
        places = (
            ("feedback on", run.switch_on_step or None),  # from the first step on there is nothing to mark
            ("crossover in training", run.last["crossover_step"]),
            ("crossover held out", held_out_crossover(run.evaluations)),
        )
        of_run = "" if len(runs) == 1 else f", {name}"
        found += [(at, word + of_run, run_key(number)) for word, step in places if (at := compute_at(run.curves, step)) is not None]
    named = len(found) <= MOST_LABELS
    return [Mark(label if named else "", x=at / 1e6, row=row, key=key) for row, (at, label, key) in enumerate(found)]
