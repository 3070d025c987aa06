"""An experiment's result.json as one picture: cells down, values across, a panel for each column, the evaluations in their colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fullband.plots import probe
from fullband.plots.style import LIGHT, colour_key, draw_chance, figure, series_label

MARKERS = {"standard": "s", "exact": "D"}  # feedback passes are circles, and triangles where they are too many for a blue of their own
DEEP = {17: "^", 64: "v"}  # from so many passes on
CONTROL = {"zeroed": "x", "shuffled": "+", "constant-gate": "1"}
AXES = {"positions": "share of correct answers", "settling": "held-out loss, nats a token", "probe": "probe accuracy at depth 0"}
ACROSS = 5  # panels side by side, at most


def plot_experiment(found: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Draw result.json into `paths`: large marks are means with 95% intervals over seeds, small ones the seeds. Accuracies
    have a line at chance, where the result says it."""
    kind, rows = found["measure"]["kind"], found["rows"]
    evaluations = list(dict.fromkeys(row["reading"] for row in rows))
    columns = list(rows[0]["columns"])
    by_cell = _places(rows)
    places = [place for own in by_cell.values() for place in own]
    deepest = places[-1] + 1
    lines = -(-len(columns) // ACROSS)
    across = -(-len(columns) // lines)
    width, height = 3.0 + 3.4 * across, 0.7 + (1.2 + 0.2 * deepest) * lines
    with figure(paths, width=width, height=height, rows=lines, columns=across) as (drawing, panels):
        axes_of = [panels] if len(columns) == 1 else list(panels.flat)
        for axes in axes_of[len(columns) :]:
            axes.set_visible(False)
        for number, (axes, column) in enumerate(zip(axes_of, columns, strict=False)):
            for row, place in zip(rows, places, strict=True):
                _point(axes, look(row["reading"], kind), row["columns"][column], place)
            middles = [(own[0] + own[-1]) / 2 for own in by_cell.values()]
            axes.set_yticks(middles, [""] * len(middles) if number % across else list(by_cell))
            axes.set_ylim(deepest, -1)
            axes.tick_params(axis="y", length=0)
            axes.grid(False, axis="y")
            axes.set(xlabel=AXES[kind], title=f"position {column}" if kind == "positions" else column)
            if kind != "settling":
                axes.set_xlim(-0.03, 1.03)
                draw_chance(axes, found.get("chance"), upright=True)
        handles = [_handle(evaluation, kind) for evaluation in evaluations] + axes_of[0].get_legend_handles_labels()[0]
        drawing.legend(handles=handles, loc="outside lower center", ncols=min(5, 2 * len(columns), len(handles)), fontsize=9)


def _places(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Heights of the lines of results, counted down, by cell: one apart, and two where a new cell begins."""
    places: dict[str, list[float]] = {}
    free = 0.0
    for cell, own in groupby(rows, key=lambda row: str(row["cell"])):
        places[cell] = [free + n for n, _ in enumerate(own)]
        free = places[cell][-1] + 2
    return places


def look(evaluation: str, kind: str = "positions") -> tuple[str, str]:
    """(colour, marker) of an evaluation: controls keep the colour of the one they take something from. Prefills look as in Fig. 7."""
    if kind == "probe":
        return LIGHT[probe.KEYS[evaluation]], probe.MARKERS[evaluation]
    name, _, control = evaluation.partition(", ")
    passes = name.removeprefix("fused-")
    marker = [mark for depth, mark in DEEP.items() if passes.isdecimal() and depth <= int(passes)][-1:] or [MARKERS.get(name, "o")]
    return LIGHT[colour_key(name)], CONTROL.get(control) or marker[0]


def _point(axes: Any, looks: tuple[str, str], value: Mapping[str, Any], place: float) -> None:
    colour, marker = looks
    axes.errorbar(
        [value["mean"]],
        [place],
        xerr=None if value["half_width"] is None else [value["half_width"]],
        color=colour,
        marker=marker,
        markersize=6.5,
        capsize=2.5,
        linewidth=1.3,
        linestyle="",
    )
    if len(value["by_seed"]) > 1:
        axes.scatter(value["by_seed"], [place] * len(value["by_seed"]), s=9, color=colour, alpha=0.45, linewidths=0)


def _handle(evaluation: str, kind: str) -> Any:
    from matplotlib.lines import Line2D

    colour, marker = look(evaluation, kind)
    name, comma, control = evaluation.partition(", ")
    words = probe.LABELS[name] if kind == "probe" else series_label(name) + comma + control
    return Line2D([], [], linestyle="", marker=marker, color=colour, markersize=6.5, label=words)
