"""Fig. 4, left: held-out loss by feedback passes, one line for each run (the paper's are training scales)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fullband.plots.chart import Axis, Line, line_chart, near_axis
from fullband.plots.markers import EXACT_DASH, RUN_MARKERS, run_key, run_style
from fullband.plots.numbers import drawn
from fullband.plots.runs import RunRecord
from fullband.plots.style import figure

EXACT = "exact"


@dataclass(frozen=True)
class PassesLine:
    """Loss (nats a token) at 0, 1, 2, … feedback passes at a run's last evaluation; `exact` is that of exact reading, if it was read."""

    name: str
    passes: list[int]
    losses: list[float]
    exact: float | None


def passes_lines(runs: Sequence[RunRecord]) -> list[PassesLine]:
    """The runs whose last evaluation read in more than one way."""
    lines = []
    for run in runs:
        losses = run.evaluations[-1].losses if run.evaluations else {}
        if len(losses) > 1:
            passes = sorted(int(name) for name in losses if name.isdecimal())
            lines.append(PassesLine(run.name, passes, [losses[str(k)] for k in passes], losses.get(EXACT)))
    return lines


def plot_passes(lines: Sequence[PassesLine], paths: Sequence[Path]) -> None:
    """Draw the lines, MOST_RUNS at most, into `paths`: a colour and a marker for each run; its exact result is a dashed level."""
    with figure(paths, width=8.6) as (drawing, axes):
        for number, line in enumerate(lines):
            axes.plot(line.passes, drawn(line.losses), label=line.name, markersize=6, **run_style(number))
            if line.exact is not None:
                exact = drawn([line.exact] * len(line.passes))
                axes.plot(line.passes, exact, label=f"{line.name}, exact", linewidth=1.4, markersize=4, **run_style(number, EXACT_DASH))
        axes.set_xticks(sorted({k for line in lines for k in line.passes}))
        axes.set(xlabel="feedback passes (0 = without feedback)", ylabel="held-out loss, nats a token")
        axes.set_title("Loss by feedback passes")
        drawing.legend(loc="outside right upper", fontsize=9, handlelength=3.2)


def passes_chart(lines: Sequence[PassesLine]) -> str:
    """The same for a page, with the values under the pointer."""
    furthest = max(k for line in lines for k in line.passes)
    shown = []
    for number, line in enumerate(lines):
        key, marker = run_key(number), RUN_MARKERS[number]
        shown.append(Line(key, line.name, line.passes, line.losses, marker=marker))
        if line.exact is not None:
            exact = [line.exact] * len(line.passes)
            shown.append(Line(key, f"{line.name}, exact", line.passes, exact, dash=EXACT_DASH, marker=marker))
    ticks = sorted({float(k) for line in lines for k in line.passes})
    x = Axis("feedback passes (0 = without feedback)", 0, furthest, ticks, prefix="feedback passes: ")
    y = near_axis("held-out loss, nats a token", [value for line in shown for value in line.y])
    return line_chart("Loss by feedback passes", shown, [], x, y)
