"""The stylesheet that all pages share: light and dark paper, phone and desk, the colours of `style`. Pages inline it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template

from fullband.plots.style import DARK, LIGHT, RUN_DARK, RUN_LIGHT

STYLESHEET = Path(__file__).with_name("page.css")


def stylesheet() -> str:
    """CSS for a <style> element; a class named as a colour of `style` sets --c, which bars, lines and panels take theirs from."""
    return Template(STYLESHEET.read_text(encoding="utf-8")).substitute(
        light=_variables(LIGHT | RUN_LIGHT),
        dark=_variables(DARK | RUN_DARK),
        colours="\n".join(f".{key} {{ --c: var(--{key}); }}" for key in LIGHT | RUN_LIGHT),
    )


def _variables(palette: Mapping[str, str]) -> str:
    return " ".join(f"--{key}: {colour};" for key, colour in palette.items())
