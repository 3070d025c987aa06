"""How the lines of several runs are told apart, in matplotlib and in SVG alike: by colours and markers. Dashes say how a run was
evaluated."""

from __future__ import annotations

import math
from collections.abc import Sequence

PASSES_DASHES = ("1.5 3.5", "", "10 4", "6 3", "12 4 2 4", "3 3", "12 3 2 3 2 3")  # by number of feedback passes, none first
EXACT_DASH = "7 2 2 2"
RUN_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # matplotlib's names
MOST_RUNS = len(RUN_MARKERS)  # in one picture


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
