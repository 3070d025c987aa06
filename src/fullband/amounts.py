"""Numbers as people, and JSON, write them."""

from __future__ import annotations

from typing import Any


def short(number: float) -> str:
    """1.26B, 512M, 94K, 12; three digits."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def size(count: float) -> str:
    """4.9 GiB, 96 MiB, 3 KiB."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count / 2**10:.0f} KiB"


def duration(seconds: float) -> str:
    """3d 04h, 2h 05m, 3m 20s, 8s."""
    whole = round(seconds)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part:02d}{below}"
    return f"{whole}s"


def percent(share: float) -> str:
    """75%, 0.38%."""
    return f"{100 * share:.3g}%" if share >= 0.01 else f"{100 * share:.2g}%"


def mixture(passes: dict[int, float]) -> str:
    """{1: 0.75, 3: 0.25} is 75% one-pass, 25% three-pass."""
    words = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}
    return ", ".join(f"{percent(share)} {words.get(k, k)}-pass" for k, share in sorted(passes.items()) if share)


def without_infinities(value: Any) -> Any:
    """The value with None for infinite and undefined numbers, and strings for keys."""
    if isinstance(value, dict):
        return {str(key): without_infinities(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_infinities(part) for part in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
