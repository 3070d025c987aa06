"""One look for all pictures: colours that the colour-blind can tell apart, on light and on dark paper.

Evaluations form a scale: the standard model grey, feedback passes from light to dark blue (Fig. 4's axis), exact evaluation orange. What
is measured of one model at several places has colours of its own: whole sequences brown, the wavefront green, positions past it the dark
blue of deep passes. Runs side by side have a colour each (`run-1` to `run-8`). Line styles repeat what colours say. Every colour
stands out from its paper by 3 : 1 at least, as WCAG 2 asks of graphics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from fullband.files import write_bytes

LIGHT = {
    "standard": "#6b6b6b",
    "fused-0": "#5a98cd",
    "fused-1": "#4186c0",
    "fused-2": "#2f75b3",
    "fused-4": "#2164a2",
    "fused-8": "#15528a",
    "fused-16": "#0b3566",
    "exact": "#d55e00",
    "rows": "#8a6d3b",
    "front": "#009e73",
}
DARK = {
    "standard": "#a9a9a9",
    "fused-0": "#3a6a9a",
    "fused-1": "#4580b6",
    "fused-2": "#5591c9",
    "fused-4": "#78addf",
    "fused-8": "#a3cbf0",
    "fused-16": "#d5e8fb",
    "exact": "#ff9d52",
    "rows": "#c9a96a",
    "front": "#4fd0a5",
}
RUN_LIGHT = {
    "run-1": "#1f6fb4",
    "run-2": "#c8501e",
    "run-3": "#0b7d5a",
    "run-4": "#8a4fb0",
    "run-5": "#9a7200",
    "run-6": "#c0397f",
    "run-7": "#0e8a9a",
    "run-8": "#4d545c",
}
RUN_DARK = {
    "run-1": "#6cb4f0",
    "run-2": "#ff9166",
    "run-3": "#45cf9f",
    "run-4": "#c79bf0",
    "run-5": "#e0b93c",
    "run-6": "#f587bd",
    "run-7": "#4fd0dd",
    "run-8": "#c3cad3",
}
PASS_KEYS = {1: "fused-1", 2: "fused-4", 3: "fused-16"}  # training curves use the same scale: deeper is darker
DASHES = {"standard": "6 4", "fused-0": "1.5 3.5", "rows": "6 4", "front": "9 3 2 3"}


def colour_key(name: str) -> str:
    """The entry of LIGHT and DARK for "standard", "exact" or "fused-4"; of a number of feedback passes without a colour of its own, that
    of the next lower one."""
    passes = name.removeprefix("fused-")
    if name in LIGHT or not passes.isdecimal():
        return name if name in LIGHT else "exact"
    known = [int(key.removeprefix("fused-")) for key in LIGHT if key.startswith("fused-")]
    return f"fused-{max(k for k in known if k <= int(passes))}"


def series_label(name: str) -> str:
    """What people call a model ("standard", "fullband") or an evaluation of it: "fused-4" is "full-band, 4 feedback passes"."""
    names = {"standard": "standard model", "fullband": "full-band model"}
    return names.get(name) or f"full-band, {passes_label(name.removeprefix('fused-'))}"


def passes_label(passes: str) -> str:
    """A number of feedback passes in words; "exact" and "converged" stay."""
    if not passes.isdecimal():
        return passes
    return "without feedback" if passes == "0" else f"{passes} feedback pass{'' if passes == '1' else 'es'}"


@contextmanager
def figure(
    paths: Sequence[Path],
    width: float = 7.2,
    height: float = 4.2,
    rows: int = 1,
    columns: int = 1,
    heights: Sequence[float] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """A (figure, axes) in this style, saved to `paths` (the suffix says how) when the block ends. Touches no global state.

    With more rows or columns than one, the axes are an array of panels [rows, columns]; `heights` are the rows' shares.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings: Any = {
        "font.size": 10.5,
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e6e6",
        "grid.linewidth": 0.7,
        "axes.edgecolor": "#8a8a8a",
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlepad": 12,
        "legend.frameon": False,
        "lines.linewidth": 2.0,
        "svg.hashsalt": "fullband",  # the same picture is the same file
    }
    with matplotlib.rc_context(settings):
        drawing = Figure(figsize=(width, height), dpi=160, layout="constrained")
        FigureCanvasAgg(drawing)
        yield (
            drawing,
            drawing.subplots(1, columns) if rows == columns == 1 else drawing.subplots(rows, columns, squeeze=False, height_ratios=heights),
        )
        for path in paths:
            kind = path.suffix.removeprefix(".")
            picture = BytesIO()
            drawing.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
            write_bytes(path, picture.getvalue())


def draw_chance(axes: Any, chance: float | None, *, upright: bool = False) -> None:
    """A dotted line at the accuracy of guessing, named in the legend; `upright` where accuracy runs along the x axis. None = not known."""
    if chance is not None:
        draw = axes.axvline if upright else axes.axhline
        draw(chance, color="#6b6b6b", linewidth=1.1, linestyle=":", zorder=1, label="chance")


def dash(name: str) -> Any:
    """A matplotlib line style."""
    return dashes(DASHES.get(name, ""))


def dashes(pattern: str) -> Any:
    """A matplotlib line style from an SVG dash array."""
    return (0, tuple(float(part) / 2 for part in pattern.split())) if pattern else "-"
