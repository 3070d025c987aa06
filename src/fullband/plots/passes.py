"""Fig. 4, left: held-out loss by feedback passes, one line for each run (the paper's are training scales)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fullband.plots.chart import Axis, Line, line_chart, near_axis
from fullband.plots.runs import LINES, RunRecord
from fullband.plots.style import LIGHT, figure

MARKERS = ("o", "s", "^", "D")
RUN_KEYS = ("fused-8", "fused-1", "standard", "fused-16")  # of lines on a page, which has no markers
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
    """Draw the lines into `paths`; exact reading is a dotted level in its colour."""
    with figure(paths, width=8.6) as (drawing, axes):
        for number, line in enumerate(lines):
            style = {"linestyle": LINES[number % len(LINES)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
            axes.plot(line.passes, line.losses, color=LIGHT["fused-8"], label=line.name, **style)
            if line.exact is not None:
                axes.axhline(
                    line.exact, color=LIGHT[EXACT], linestyle=LINES[number % len(LINES)], linewidth=1.4, label=f"{line.name}, exact"
                )
        axes.set_xticks(sorted({k for line in lines for k in line.passes}))
        axes.set(xlabel="feedback passes (0 = plain reading)", ylabel="held-out loss, nats a token")
        axes.set_title("Loss by feedback passes")
        drawing.legend(loc="outside right upper", fontsize=9)


def passes_chart(lines: Sequence[PassesLine]) -> str:
    """The same for a page, with the values under the pointer."""
    furthest = max(k for line in lines for k in line.passes)
    drawn = [Line(RUN_KEYS[n % len(RUN_KEYS)], line.name, line.passes, line.losses) for n, line in enumerate(lines)]
    drawn += [Line(EXACT, f"{line.name}, exact", line.passes, [line.exact] * len(line.passes)) for line in lines if line.exact is not None]
    ticks = sorted({float(k) for line in lines for k in line.passes})
    x = Axis("feedback passes (0 = plain reading)", 0, furthest, ticks, prefix="feedback passes: ")
    y = near_axis("held-out loss, nats a token", [value for line in drawn for value in line.y])
    return line_chart("Loss by feedback passes", drawn, [], x, y)
