"""Line charts: what one shows (`Chart`), drawn as SVG for pages here and by matplotlib in `picture`. Lines of several runs are told apart
by colours and markers; dashes say how a run was evaluated.

On a page a chart is coloured by the style sheet (light and dark) and shows the values under the pointer. It is made twice, for a desk and
for a phone; the style sheet shows one of them. The page's script (chart.js) reads the values from the `data-chart` attribute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import Any

from fullband.plots.numbers import drawn, finite
from fullband.plots.style import DASHES

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LETTER = 6.6  # pixels that a letter of a label takes on average, and a little more
PASSES_DASHES = ("1.5 3.5", "", "10 4", "6 3", "12 4 2 4", "3 3", "12 3 2 3 2 3")  # by number of feedback passes, none first
EXACT_DASH = "7 2 2 2"
RUN_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # matplotlib's names
MOST_RUNS = len(RUN_MARKERS)  # in one picture


@dataclass(frozen=True)
class Line:
    """A named line; `key` is its style. `faint` values are drawn under it (a raw curve under its running mean). `dash` (an SVG dash
    array; None = the style's) and `marker` tell lines of one style apart. A value that is not finite is a gap."""

    key: str
    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    faint: Sequence[float | None] | None = None
    dash: str | None = None
    marker: str = ""

    @property
    def pattern(self) -> str:
        """Its SVG dash array, empty for a whole line."""
        return DASHES.get(self.key, "") if self.dash is None else self.dash

    @property
    def points(self) -> list[tuple[float, float]]:
        """What has a place: (x, finite y)."""
        return [(a, b) for a, b in zip(self.x, drawn(self.y), strict=True) if b == b]


@dataclass(frozen=True)
class Mark:
    """A labelled line across the chart, at x or at y; `row` moves the label of one at x down, clear of another's. `key` is the style of
    the line that it belongs to, where there are several."""

    label: str
    x: float | None = None
    y: float | None = None
    row: int = 0
    key: str = ""


@dataclass(frozen=True)
class Axis:
    """A range, its ticks, and how a value is written in the tooltip: `prefix`, `digits`, `unit`. A logarithmic one lies above 0."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    digits: int = 0
    prefix: str = ""
    unit: str = ""
    log: bool = False

    def share(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Size:
    name: str
    width: int
    height: int
    left: int = 56
    right: int = 14
    top: int = 14
    bottom: int = 44


DESK, PHONE = Size("desk", 760, 380), Size("phone", 360, 320, left=52, right=10)
LOW = tuple(replace(size, height=220) for size in (DESK, PHONE))


def nice_ticks(high: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to `high` > 0 (where nothing was measured above 0: to 1)."""
    high = high if 0 < high < math.inf else 1.0
    rough = high / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [round(step * i, 10) for i in range(int(high / step + 1e-9) + 1)]


def log_axis(label: str, values: Sequence[float | None], **options: Any) -> Axis:
    """A logarithmic axis of whole decades around the values above 0 (at least one); up to six labelled ticks."""
    above = [value for value in finite(values) if value > 0] or [1.0]
    low, high = max(-300, math.floor(math.log10(min(above)))), min(308, math.ceil(math.log10(max(above))))
    high = max(high, low + 1)
    step = math.ceil((high - low) / 6)
    return Axis(label, 10.0**low, 10.0**high, [10.0**power for power in range(low, high + 1, step)], log=True, **options)


def near_axis(label: str, values: Sequence[float | None], digits: int = 3, above: float = 0.0) -> Axis:
    """An axis around the values, which need not reach down to 0; with `above` (a share of their range) of room for labels."""
    near = finite(values) or [0.0]
    span = max(near) - min(near)
    margin = 0.06 * span or 0.1 * (abs(near[0]) or 1.0)
    low, high = min(near) - margin, max(near) + margin + above * span
    return Axis(label, low, high, ticks_within(low, high), digits=digits)


def ticks_within(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`."""
    step = nice_ticks(high - low)[1]
    return [round(step * i, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


@dataclass(frozen=True)
class Chart:
    """Lines over two axes. Values should lie within the axes; lines are cut at their edges. `background` lines are drawn faintly, without
    a place in the legend. `low` = on a page, at two thirds of the height or less."""

    title: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    marks: Sequence[Mark] = ()
    background: Sequence[Line] = ()
    low: bool = False

    def html(self) -> str:
        """A <figure> with a legend and the chart in both sizes. Lines without a finite value are left out."""
        shown = [line for line in self.lines if line.points]
        if not shown:
            return f"<p>{escape(self.title)}: no finite value{' above 0' if self.y.log else ''}.</p>"
        legend = "".join(f"<li>{_swatch(line)}{escape(line.label)}</li>" for line in shown)
        charts = "".join(_svg(replace(self, lines=shown), size) for size in (LOW if self.low else (DESK, PHONE)))
        canvas = f'<div class="canvas">{charts}<div class="tip" hidden></div></div>'
        return f'<figure class="chart"><ul class="legend">{legend}</ul>{canvas}</figure>'


def _swatch(line: Line) -> str:
    width = 36 if line.marker else 22
    sample = f'<path class="{line.key}" d="M1 5H{width - 1}"{_dash(line)}/>{_marker(line, width / 2, 5, 4.5)}'
    return f'<svg class="swatch" width="{width}" height="10" aria-hidden="true">{sample}</svg>'


def _dash(line: Line) -> str:
    return f' stroke-dasharray="{line.pattern}"' if line.pattern else ""


def _marker(line: Line, x: float, y: float, radius: float = 5.5) -> str:
    return f'<polygon class="{line.key}" points="{outline(line.marker, x, y, radius)}"/>' if line.marker else ""


def _svg(chart: Chart, size: Size) -> str:
    plot, lines, x, y = _Plot(chart.x, chart.y, size), chart.lines, chart.x, chart.y
    parts = [plot.axes()]
    parts += [plot.path(line.x, line.y, f"{line.key} faint", "") for line in chart.background]
    parts += [plot.path(line.x, line.faint, f"{line.key} faint", "") for line in lines if line.faint]
    parts += [plot.path(line.x, line.y, line.key, _dash(line)) + plot.markers(line) for line in lines]
    parts += [plot.mark_line(mark) for mark in chart.marks] + [plot.mark_label(mark) for mark in chart.marks]
    parts.append(f'<line class="cursor" y1="{size.top}" y2="{plot.bottom}" visibility="hidden"/>')
    places = [[round(a, 4) for a, _ in line.points] for line in lines]
    values = [[float(f"{b:.3g}") if y.log else round(b, 3) for _, b in line.points] for line in lines]
    data = {
        "left": size.left,
        "width": plot.width,
        "x": {"low": x.low, "high": x.high, "digits": x.digits, "prefix": x.prefix, "unit": x.unit, "log": x.log},
        "y": {"digits": y.digits, "log": y.log},
        "grid": max(places, key=len),
        "lines": [{"key": line.key, "label": line.label, "x": at, "y": own} for line, at, own in zip(lines, places, values, strict=True)],
    }
    return (
        f'<svg class="{size.name}" viewBox="0 0 {size.width} {size.height}" role="img" aria-label="{escape(chart.title)}" '
        f"data-chart='{escape(json.dumps(data, separators=(',', ':')))}'>{''.join(parts)}</svg>"
    )


def _tick(value: float, log: bool) -> str:
    """Powers of ten as such: 10⁻⁵ is narrower than 1e-05."""
    return f"10{str(round(math.log10(value))).translate(SUPERSCRIPTS)}" if log else f"{value:g}"


class _Plot:
    """Coordinates of one chart in one size."""

    def __init__(self, x: Axis, y: Axis, size: Size):
        self.x, self.y, self.size = x, y, size
        self.width = size.width - size.left - size.right
        self.bottom = size.height - size.bottom

    def at_x(self, value: float) -> float:
        return round(self.size.left + self.x.share(value) * self.width, 1)

    def at_y(self, value: float) -> float:
        return round(self.bottom - min(1.0, max(0.0, self.y.share(value))) * (self.bottom - self.size.top), 1)

    def path(self, x: Sequence[float], y: Sequence[float | None] | None, key: str, attributes: str) -> str:
        """A polyline, or several where there are gaps."""
        points = zip(x, drawn(y or []), strict=True)
        pieces = [list(piece) for whole, piece in groupby(points, key=lambda point: point[1] == point[1]) if whole]
        return "".join(self._piece(piece, key, attributes) for piece in pieces)

    def _piece(self, points: list[tuple[float, float]], key: str, attributes: str) -> str:
        if len(points) == 1:  # a line from a point to itself is seen by its round ends
            points, attributes = points * 2, ' stroke-linecap="round"'
        corners = " ".join(f"{self.at_x(a)},{self.at_y(b)}" for a, b in points)
        return f'<polyline class="{key}" points="{corners}"{attributes}/>'

    def markers(self, line: Line) -> str:
        return "".join(_marker(line, self.at_x(a), self.at_y(b)) for a, b in line.points)

    def axes(self) -> str:
        left, right, size = self.size.left, self.size.left + self.width, self.size
        middle = (left + right) / 2
        parts = []
        for tick in self.y.ticks:
            at = self.at_y(tick)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at}" y2="{at}"/>')
            parts.append(f'<text x="{left - 7}" y="{at + 4}" text-anchor="end">{_tick(tick, self.y.log)}</text>')
        for tick in self.x.ticks:
            parts.append(f'<text x="{self.at_x(tick)}" y="{self.bottom + 18}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{self.bottom}" y2="{self.bottom}"/>')
        parts.append(f'<text class="name" x="{middle}" y="{size.height - 6}" text-anchor="middle">{escape(self.x.label)}</text>')
        parts.append(
            f'<text class="name" x="11" y="{(size.top + self.bottom) / 2}" text-anchor="middle" '
            f'transform="rotate(-90 11 {(size.top + self.bottom) / 2})">{escape(self.y.label)}</text>'
        )
        return "".join(parts)

    def mark_line(self, mark: Mark) -> str:
        if mark.y is not None:
            at, right = self.at_y(mark.y), self.size.left + self.width
            return f'<line class="mark dotted" x1="{self.size.left}" x2="{right}" y1="{at}" y2="{at}"/>'
        assert mark.x is not None
        at = self.at_x(mark.x)
        own = f"mark {mark.key}".rstrip()
        return f'<line class="{own}" x1="{at}" x2="{at}" y1="{self.size.top}" y2="{self.bottom}"/>'

    def mark_label(self, mark: Mark) -> str:
        """Drawn after all lines, on paper of its own (chart.css), so that another mark's line does not run through it."""
        label = escape(mark.label)
        if not label:
            return ""
        if mark.y is not None:
            return f'<text class="note" x="{self.size.left + self.width - 2}" y="{self.at_y(mark.y) + 15}" text-anchor="end">{label}</text>'
        assert mark.x is not None
        at, right, width = self.at_x(mark.x), self.size.left + self.width, LETTER * len(mark.label)
        place, anchor = (at - 5 if at - 5 - width >= 0 else right), "end"  # at the right edge, it lies across the mark
        if at + 5 + width <= right:
            place, anchor = at + 5, "start"
        return f'<text class="note" x="{place}" y="{self.size.top + 12 + 17 * mark.row}" text-anchor="{anchor}">{label}</text>'


def run_key(number: int) -> str:
    """The colour of run `number` < MOST_RUNS of a picture: a class of the style sheet."""
    return f"run-{number + 1}"


def passes_dashes(names: Sequence[str]) -> dict[str, str]:
    """An SVG dash array (empty = a whole line) for each way of evaluating: "0", "1", … feedback passes, in order, and "exact"."""
    numbers = sorted({int(name) for name in names if name.isdecimal()})
    after = iter(PASSES_DASHES[1:] * (1 + len(numbers) // (len(PASSES_DASHES) - 1)))
    found = {str(number): PASSES_DASHES[0] if number == 0 else next(after) for number in numbers}
    return found | dict.fromkeys((name for name in names if not name.isdecimal()), EXACT_DASH)


def outline(marker: str, x: float, y: float, radius: float) -> str:
    """The points of a marker as those of an SVG polygon."""
    corners = [(x + radius * a, y + radius * b) for a, b in _CORNERS[marker]]
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)


def _at(degrees: float, radius: float) -> tuple[float, float]:
    return radius * math.cos(math.radians(degrees)), radius * math.sin(math.radians(degrees))


def _around(count: int, first: float, *radii: float) -> list[tuple[float, float]]:
    """Corners at equal angles from `first` (degrees) on, at these distances in turn."""
    return [_at(first + 360 * n / count, radii[n % len(radii)]) for n in range(count)]


def _cross(first: float) -> list[tuple[float, float]]:
    """Four bars: two corners at the end of each, and one between it and the next."""
    bars = [first + 90 * n for n in range(4)]
    return [corner for bar in bars for corner in (_at(bar - 20, 1.15), _at(bar + 20, 1.15), _at(bar + 45, 0.55))]


_CORNERS = {
    "o": _around(16, 0, 0.9),
    "s": _around(4, 45, 1.15),
    "^": _around(3, -90, 1.2),
    "D": _around(4, 0, 1.1),
    "v": _around(3, 90, 1.2),
    "P": _cross(0),
    "X": _cross(45),
    "*": _around(10, -90, 1.35, 0.55),
}
