"""Line charts as SVG text for the report: coloured by its style sheet (light and dark), with the values under the pointer.

Each chart is made twice, for a desk and for a phone; the style sheet shows one of them. The page's script reads the values from the
`data-chart` attribute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fullband.plots.style import DASHES


@dataclass(frozen=True)
class Line:
    """A named line; `key` is its style. `faint` values are drawn behind it (a raw curve behind its running mean)."""

    key: str
    label: str
    x: Sequence[float]
    y: Sequence[float]
    faint: Sequence[float] | None = None


@dataclass(frozen=True)
class Mark:
    """A labelled line across the chart, at x or at y; `row` moves the label of one at x down, clear of another's."""

    label: str
    x: float | None = None
    y: float | None = None
    row: int = 0


@dataclass(frozen=True)
class Axis:
    """A range, its ticks, and how a value is written in the tooltip: `prefix`, `digits`, `unit`."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    digits: int = 0
    prefix: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Size:
    name: str
    width: int
    height: int
    left: int = 46
    right: int = 14
    top: int = 14
    bottom: int = 44


DESK, PHONE = Size("desk", 760, 380), Size("phone", 360, 320, left=44, right=10)


def nice_ticks(high: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to `high`."""
    rough = high / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [round(step * i, 10) for i in range(int(high / step + 1e-9) + 1)]


def line_chart(title: str, lines: Sequence[Line], marks: Sequence[Mark], x: Axis, y: Axis) -> str:
    """A <figure> with a legend and the chart in both sizes. Values should lie within the axes; lines are cut at their edges."""
    legend = "".join(f"<li>{_swatch(line.key)}{escape(line.label)}</li>" for line in lines)
    charts = "".join(_svg(title, lines, marks, x, y, size) for size in (DESK, PHONE))
    canvas = f'<div class="canvas">{charts}<div class="tip" hidden></div></div>'
    return f'<figure class="chart"><ul class="legend">{legend}</ul>{canvas}</figure>'


def _swatch(key: str) -> str:
    return f'<svg class="swatch" width="22" height="8" aria-hidden="true"><path class="{key}" d="M1 4H21"{_dash(key)}/></svg>'


def _dash(key: str) -> str:
    return f' stroke-dasharray="{DASHES[key]}"' if key in DASHES else ""


def _svg(title: str, lines: Sequence[Line], marks: Sequence[Mark], x: Axis, y: Axis, size: Size) -> str:
    plot = _Plot(x, y, size)
    parts = [plot.axes()]
    parts += [plot.path(line.x, line.faint, f"{line.key} faint", "") for line in lines if line.faint]
    parts += [plot.path(line.x, line.y, line.key, _dash(line.key)) for line in lines]
    parts += [plot.mark(mark) for mark in marks]
    parts.append(f'<line class="cursor" y1="{size.top}" y2="{plot.bottom}" visibility="hidden"/>')
    data = {
        "left": size.left,
        "width": plot.width,
        "x": {"low": x.low, "high": x.high, "digits": x.digits, "prefix": x.prefix, "unit": x.unit},
        "y": {"digits": y.digits},
        "lines": [{"key": line.key, "label": line.label, "x": _short(line.x, 4), "y": _short(line.y, 3)} for line in lines],
    }
    return (
        f'<svg class="{size.name}" viewBox="0 0 {size.width} {size.height}" role="img" aria-label="{escape(title)}" '
        f"data-chart='{escape(json.dumps(data, separators=(',', ':')))}'>{''.join(parts)}</svg>"
    )


def _short(values: Sequence[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]


class _Plot:
    """Coordinates of one chart in one size."""

    def __init__(self, x: Axis, y: Axis, size: Size):
        self.x, self.y, self.size = x, y, size
        self.width = size.width - size.left - size.right
        self.bottom = size.height - size.bottom

    def at_x(self, value: float) -> float:
        return round(self.size.left + (value - self.x.low) / (self.x.high - self.x.low) * self.width, 1)

    def at_y(self, value: float) -> float:
        share = (value - self.y.low) / (self.y.high - self.y.low)
        return round(self.bottom - min(1.0, max(0.0, share)) * (self.bottom - self.size.top), 1)

    def path(self, x: Sequence[float], y: Sequence[float] | None, key: str, attributes: str) -> str:
        points = " ".join(f"{self.at_x(a)},{self.at_y(b)}" for a, b in zip(x, y or [], strict=True))
        return f'<polyline class="{key}" points="{points}"{attributes}/>'

    def axes(self) -> str:
        left, right, size = self.size.left, self.size.left + self.width, self.size
        middle = (left + right) / 2
        parts = []
        for tick in self.y.ticks:
            at = self.at_y(tick)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at}" y2="{at}"/>')
            parts.append(f'<text x="{left - 7}" y="{at + 4}" text-anchor="end">{tick:g}</text>')
        for tick in self.x.ticks:
            parts.append(f'<text x="{self.at_x(tick)}" y="{self.bottom + 18}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{self.bottom}" y2="{self.bottom}"/>')
        parts.append(f'<text class="name" x="{middle}" y="{size.height - 6}" text-anchor="middle">{escape(self.x.label)}</text>')
        parts.append(
            f'<text class="name" x="11" y="{(size.top + self.bottom) / 2}" text-anchor="middle" '
            f'transform="rotate(-90 11 {(size.top + self.bottom) / 2})">{escape(self.y.label)}</text>'
        )
        return "".join(parts)

    def mark(self, mark: Mark) -> str:
        label = escape(mark.label)
        if mark.y is not None:
            at, right = self.at_y(mark.y), self.size.left + self.width
            line = f'<line class="mark dotted" x1="{self.size.left}" x2="{right}" y1="{at}" y2="{at}"/>'
            return f'{line}<text class="note" x="{right - 2}" y="{at + 15}" text-anchor="end">{label}</text>'
        assert mark.x is not None
        at, anchor, gap = self.at_x(mark.x), "start", 5
        if at > self.size.left + 0.7 * self.width:
            anchor, gap = "end", -5
        line = f'<line class="mark" x1="{at}" x2="{at}" y1="{self.size.top}" y2="{self.bottom}"/>'
        return f'{line}<text class="note" x="{at + gap}" y="{self.size.top + 12 + 17 * mark.row}" text-anchor="{anchor}">{label}</text>'
