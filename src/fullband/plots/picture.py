"""Charts drawn by matplotlib: the same `Chart` that a page shows as SVG."""

from __future__ import annotations

from typing import Any

from fullband.plots.chart import Chart, Mark
from fullband.plots.numbers import drawn
from fullband.plots.style import LIGHT, RUN_LIGHT, dashes

COLOURS = LIGHT | RUN_LIGHT
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # under a label, so that no line runs through it


def draw_chart(axes: Any, chart: Chart) -> None:
    """Lines, marks, scales and names of the axes; the title and the legend are the caller's."""
    for line in chart.lines:
        style: dict[str, Any] = {"color": COLOURS[line.key], "linestyle": dashes(line.pattern), "label": line.label}
        if line.faint:
            axes.plot(line.x, drawn(line.faint), color=style["color"], linewidth=0.8, alpha=0.25)
        marker = line.marker or ("o" if len(line.points) == 1 else None)  # a line of a single point would not be seen
        axes.plot(line.x, drawn(line.y), marker=marker, markersize=5, **style)
    axes.set(xlabel=chart.x.label, ylabel=chart.y.label)
    axes.set(xscale="log" if chart.x.log else "linear", yscale="log" if chart.y.log else "linear")
    axes.set_xticks(chart.x.ticks, [f"{tick:g}" for tick in chart.x.ticks])
    axes.set_yticks(chart.y.ticks)
    axes.minorticks_off()
    axes.set(xlim=(chart.x.low, chart.x.high), ylim=(chart.y.low, chart.y.high))
    for mark in chart.marks:
        draw_mark(axes, mark, right=mark.x is not None and chart.x.share(mark.x) > 0.6)


def draw_mark(axes: Any, mark: Mark, right: bool) -> None:
    """The line of a mark and its label; a label at x stands at the top, on the mark's left if the mark is far to the `right`."""
    line, words = {"color": "#8a8a8a", "linewidth": 1, "linestyle": ":"}, {"color": "#5f5f5f", "fontsize": 9}
    if mark.y is not None:
        axes.axhline(mark.y, **line)
        axes.text(0.99, mark.y, mark.label, ha="right", va="bottom", transform=axes.get_yaxis_transform(), **words)
    else:
        axes.axvline(mark.x, **line)
        place, side = (mark.x, 0.98 - 0.07 * mark.row), "right" if right else "left"
        axes.text(*place, f" {mark.label} ", ha=side, va="top", bbox=PAPER, transform=axes.get_xaxis_transform(), **words)
