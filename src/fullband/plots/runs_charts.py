"""The pictures of the runs page: held-out loss with training in the background and what is marked there, gradient norms, learning rates."""

from __future__ import annotations

from collections.abc import Sequence

from fullband.plots.chart import Chart, Line, Mark, near_axis
from fullband.plots.curves import ROOM, compute_at
from fullband.plots.markers import RUN_MARKERS, passes_dashes, run_key
from fullband.plots.runs import RunRecord, held_out_crossover, names_of
from fullband.plots.steps import compute_axis, millions, steps_html
from fullband.plots.style import passes_label

MOST_LABELS = 6  # of marks in one picture; with more, the table alone says which is which


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
