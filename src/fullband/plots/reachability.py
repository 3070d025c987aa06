"""Fig. 1, measured: which earlier states move a state of the last position, in Standard and in Soft."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullband.plots.style import LIGHT, figure

SHADES = ("fused-0", "fused-2", "fused-8")  # weak, middling, strong
BOUNDS = (0.03, 0.3)  # of influence, between the shades
WORDS = ("weak (under 0.03)", "0.03 to 0.3", "strong (over 0.3)")


def shade(influence: float | None) -> str | None:
    """The style of a state by its influence; None for one that cannot be reached, or whose influence is not finite."""
    return None if influence is None or not 0 < influence < math.inf else SHADES[sum(influence >= bound for bound in BOUNDS)]


def shown_layer(layers: Sequence[int]) -> int:
    """Index of the target layer that is drawn: a low one, which Standard leaves little to read."""
    return min(len(layers) - 1, max(1, len(layers) // 2))


def plot_reachability(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Draw the grids of a diagnosis (`Diagnosis.to_json`) into `paths`. Raises ValueError if it has none."""
    grids = diagnosis["reach"]
    if not grids:
        raise ValueError(f"reachability was not measured: {diagnosis['reach_missing']}")
    with figure(paths, width=9.4, height=1.9 + 0.52 * len(grids[0]["layers"]), columns=len(grids)) as (drawing, (panels,)):
        for axes, grid in zip(panels, grids, strict=True):
            _draw(axes, grid)
        drawing.legend(handles=_legend(), loc="outside lower center", ncols=5, fontsize=9, handletextpad=0.3)


def _draw(axes: Any, grid: Mapping[str, Any]) -> None:
    layers, target = grid["layers"], shown_layer(grid["layers"])
    influence = grid["influence"][target]
    last = len(influence) - 1
    for position, column in enumerate(influence):
        for height, value in enumerate(column):
            if position == last and height > target:
                continue  # above the target in its own column: what comes after it
            key = shade(value)
            is_target = position == last and height == target
            colour = LIGHT["exact"] if is_target else "#ffffff" if key is None else LIGHT[key]
            edge = LIGHT["exact"] if is_target else "#8a8a8a" if key is None else LIGHT[key]
            axes.scatter([position], [height], s=210, color=colour, edgecolors=edge, linewidths=1.2, zorder=3)
    if grid["mode"] == "soft":
        axes.axvline(grid["prompt"] - 0.5, color="#8a8a8a", linewidth=1, linestyle=":")
        axes.text(grid["prompt"] - 0.6, len(layers) - 0.42, "plain prompt", ha="right", fontsize=8.5, color="#5f5f5f")
        axes.text(grid["prompt"] - 0.4, len(layers) - 0.42, "with feedback", ha="left", fontsize=8.5, color="#5f5f5f")
    axes.grid(False)
    axes.set_xticks(range(last + 1), [f"t - {last - position}" if position < last else "t" for position in range(last + 1)])
    axes.set_yticks(range(len(layers)), ["input" if layer == 0 else f"layer {layer}" for layer in layers])
    axes.set(xlim=(-0.6, last + 0.6), ylim=(-0.6, len(layers) - 0.1))
    name = {"standard": "Standard", "soft": "Soft"}[grid["mode"]]
    what = "input" if layers[target] == 0 else f"layer {layers[target]}"
    axes.set_title(f"{name}: what moves {what} at t")


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    def dot(face: str, edge: str, label: str) -> Any:
        return Line2D([], [], linestyle="", marker="o", markersize=9, markerfacecolor=face, markeredgecolor=edge, label=label)

    shades = [dot(LIGHT[key], LIGHT[key], words) for key, words in zip(SHADES, WORDS, strict=True)]
    return [dot(LIGHT["exact"], LIGHT["exact"], "the state asked about"), *reversed(shades), dot("#ffffff", "#8a8a8a", "out of reach")]


def influence_text(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.2g}" if value > 0 else "out of reach"
