"""How the lines of several runs are told apart where all have one colour: by dashes and markers, in matplotlib and in SVG alike."""

from __future__ import annotations

import math
from typing import Any

from fullband.plots.style import dashes

RUN_DASHES = ("", "10 4", "3 3", "12 4 2 4")
RUN_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # matplotlib's names
MOST_RUNS = len(RUN_MARKERS)  # in one picture


def run_style(number: int) -> dict[str, Any]:
    """Line style and marker of run `number` < MOST_RUNS of a picture, for matplotlib."""
    return {"linestyle": dashes(run_dash(number)), "marker": RUN_MARKERS[number]}


def run_dash(number: int) -> str:
    """An SVG dash array; empty = a whole line. Every fourth run has the same, and another marker."""
    return RUN_DASHES[number % len(RUN_DASHES)]


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
