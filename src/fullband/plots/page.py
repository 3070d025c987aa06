"""Pages that open offline: their templates filled in, with the style sheet that all share (light and dark paper, phone and desk, the
colours of `style`) and the style and script of charts within them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from fullband.plots.style import DARK, LIGHT, RUN_DARK, RUN_LIGHT

HERE = Path(__file__).parent
STYLESHEET = HERE / "page.css"


def fill(template: Path, **parts: Any) -> str:
    """The page of a template: `parts`, and what every page may have."""
    own = {"stylesheet": stylesheet(), "chart_style": _text(HERE / "chart.css"), "chart_script": _text(HERE / "chart.js")}
    return Template(_text(template)).substitute(own, **parts)


def stylesheet() -> str:
    """CSS for a <style> element; a class named as a colour of `style` sets --c, which bars, lines and panels take theirs from."""
    return Template(_text(STYLESHEET)).substitute(
        light=_variables(LIGHT | RUN_LIGHT),
        dark=_variables(DARK | RUN_DARK),
        colours="\n".join(f".{key} {{ --c: var(--{key}); }}" for key in LIGHT | RUN_LIGHT),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _variables(palette: Mapping[str, str]) -> str:
    return " ".join(f"--{key}: {colour};" for key, colour in palette.items())
