"""Fig. 4, left: held-out loss by feedback passes, one line for each run (the paper's are training scales)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullband.plots.chart import EXACT_DASH, RUN_MARKERS, Axis, Chart, Line, near_axis, run_key
from fullband.plots.picture import draw_chart
from fullband.plots.runs import RunRecord
from fullband.plots.style import figure


def has_passes(run: RunRecord) -> bool:
    """Whether its last evaluation was made with several numbers of feedback passes."""
    return bool(run.evaluations) and len(run.evaluations[-1].losses) > 1


def passes_chart(runs: Sequence[RunRecord]) -> Chart:
    """Loss (nats a token) at 0, 1, 2, … feedback passes at the last evaluation of runs, MOST_RUNS at most: a colour and a marker for each
    run. The loss of exact evaluation, if there is one, is a dashed level."""
    lines, ticks = [], set()
    for number, run in enumerate(runs):
        key, marker, losses = run_key(number), RUN_MARKERS[number], run.evaluations[-1].losses
        passes = sorted(int(name) for name in losses if name.isdecimal())
        ticks.update(passes)
        lines.append(Line(key, run.name, passes, [losses[str(k)] for k in passes], marker=marker))
        if "exact" in losses:
            lines.append(Line(key, f"{run.name}, exact", passes, [losses["exact"]] * len(passes), dash=EXACT_DASH, marker=marker))
    x = Axis("feedback passes (0 = without feedback)", 0, max(ticks, default=0) or 1, sorted(ticks), prefix="feedback passes: ")
    y = near_axis("held-out loss, nats a token", [value for line in lines for value in line.y])
    return Chart("Loss by feedback passes", lines, x, y)


def plot_passes(runs: Sequence[RunRecord], paths: Sequence[Path]) -> None:
    with figure(paths, width=8.6) as (drawing, axes):
        chart = passes_chart(runs)
        draw_chart(axes, chart)
        axes.set_title(chart.title)
        drawing.legend(loc="outside right upper", fontsize=9, handlelength=3.2)
