"""Measured numbers as a picture takes them: what is infinite, undefined or missing (JSON's null) leaves a gap and breaks nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable


def drawn(values: Iterable[float | None]) -> list[float]:
    """The values, NaN for those that have no place in a picture."""
    return [value if value is not None and math.isfinite(value) else math.nan for value in values]


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that have a place."""
    return [value for value in drawn(values) if value == value]


def number(value: float | None, digits: int = 3) -> str:
    """In words: three digits, and a dash for what was not measured."""
    return "–" if value is None or value != value else f"{value:.{digits}g}"
