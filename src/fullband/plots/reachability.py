"""Fig. 1, measured: which earlier states move a state of the last position, in Standard and in Soft; as a picture and for a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fullband.plots.style import LIGHT, figure

SHADES = ("fused-0", "fused-2", "fused-8")  # weak, middling, strong
BOUNDS = (0.03, 0.3)  # of influence, between the shades
NONE = "white"  # of a state out of reach
LEGEND = {
    "exact": "the state asked about",
    "fused-8": "strong (over 0.3)",
    "fused-2": "0.03 to 0.3",
    "fused-0": "weak (under 0.03)",
    NONE: "out of reach",
}
NAMES = {"standard": "Standard", "soft": "Soft"}


def shade(influence: float | None) -> str:
    """The style of a state by its influence; NONE for one that cannot be reached, or whose influence is not finite."""
    return NONE if influence is None or not 0 < influence < math.inf else SHADES[sum(influence >= bound for bound in BOUNDS)]


def shown_layer(layers: Sequence[int]) -> int:
    """Index of the target layer that is drawn: a low one, of which Standard leaves little in reach."""
    return min(len(layers) - 1, max(1, len(layers) // 2))


def states_of(grid: Mapping[str, Any]) -> Iterator[tuple[int, int, str, str]]:
    """(position, index of the layer, style, what is said of it) of each state; none above the target in its own column, which come after
    it."""
    target = shown_layer(grid["layers"])
    influence = grid["influence"][target]
    for position, column in enumerate(influence):
        is_last = position == len(influence) - 1
        for index, value in enumerate(column[: target + 1] if is_last else column):
            asked = is_last and index == target
            yield position, index, "exact" if asked else shade(value), LEGEND["exact"] if asked else influence_text(value)


def influence_text(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.2g}" if value > 0 else LEGEND[NONE]


def _names(grid: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names of the positions and of the layers."""
    last = len(grid["influence"][0]) - 1
    positions = [f"t − {last - position}" if position < last else "t" for position in range(last + 1)]
    return positions, ["input" if layer == 0 else f"layer {layer}" for layer in grid["layers"]]


def plot_reachability(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Draw the grids of a diagnosis (`Diagnosis.to_json`) into `paths`. Raises ValueError if it has none."""
    from matplotlib.lines import Line2D

    grids = diagnosis["reach"]
    if not grids:
        raise ValueError(f"reachability was not measured: {diagnosis['reach_missing']}")
    with figure(paths, width=9.4, height=1.9 + 0.52 * len(grids[0]["layers"]), columns=len(grids)) as (drawing, (panels,)):
        for axes, grid in zip(panels, grids, strict=True):
            _draw(axes, grid)
        handles = []
        for key, words in LEGEND.items():
            face, edge = _colours(key)
            handles.append(Line2D([], [], linestyle="", marker="o", markersize=9, markerfacecolor=face, markeredgecolor=edge, label=words))
        drawing.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9, handletextpad=0.3)


def _colours(key: str) -> tuple[str, str]:
    """Of a state and of its edge."""
    return ("#ffffff", "#8a8a8a") if key == NONE else (LIGHT[key], LIGHT[key])


def _draw(axes: Any, grid: Mapping[str, Any]) -> None:
    positions, layers = _names(grid)
    for position, index, key, _ in states_of(grid):
        face, edge = _colours(key)
        axes.scatter([position], [index], s=210, color=face, edgecolors=edge, linewidths=1.2, zorder=3)
    if grid["mode"] == "soft":
        axes.axvline(grid["prompt"] - 0.5, color="#8a8a8a", linewidth=1, linestyle=":")
        for place, side, words in ((-0.6, "right", "prompt, no feedback"), (-0.4, "left", "with feedback")):
            axes.text(grid["prompt"] + place, len(layers) - 0.42, words, ha=side, fontsize=8.5, color="#5f5f5f")
    axes.grid(False)
    axes.set_xticks(range(len(positions)), positions)
    axes.set_yticks(range(len(layers)), layers)
    axes.set(xlim=(-0.6, len(positions) - 0.4), ylim=(-0.6, len(layers) - 0.1))
    axes.set_title(f"{NAMES[grid['mode']]}: what moves {layers[shown_layer(grid['layers'])]} at t")


def reach_html(diagnosis: Mapping[str, Any]) -> str:
    """The same for a page, with the values under the pointer."""
    if not diagnosis["reach"]:
        return f"<p>Not measured: {escape(diagnosis['reach_missing'])}.</p>"
    keys = "".join(f'<li><span class="dot {key}"></span>{words}</li>' for key, words in LEGEND.items())
    grids = "".join(_svg(grid) for grid in diagnosis["reach"])
    caption = (
        f"Measured by gradients ({reach_text(diagnosis)}): how far a change of each state moves the one asked about, relative to both. In "
        "Soft the dotted line ends the prompt, which runs without feedback but at its end. Point at a state for its value."
    )
    return f'<ul class="legend">{keys}</ul><div class="grids">{grids}</div><figcaption>{caption}</figcaption>'


def _svg(grid: Mapping[str, Any]) -> str:
    positions, layers = _names(grid)
    left, top, step_x, step_y = 62, 14, 46, 36
    width, height = left + step_x * len(positions), top + step_y * len(layers) + 24
    xs = [left + step_x * position + 20 for position in range(len(positions))]
    ys = [top + step_y * (len(layers) - 1 - index) + 16 for index in range(len(layers))]
    parts = [f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{name}</text>' for y, name in zip(ys, layers, strict=True)]
    parts += [f'<text x="{x}" y="{height - 6}" text-anchor="middle">{name}</text>' for x, name in zip(xs, positions, strict=True)]
    for position, index, key, said in states_of(grid):
        title = f"<title>{positions[position]}, {layers[index]}: {said}</title>"
        parts.append(f'<circle class="{key}" cx="{xs[position]}" cy="{ys[index]}" r="10">{title}</circle>')
    if grid["mode"] == "soft":
        x = left + step_x * grid["prompt"] - 3
        parts.append(f'<line class="mark dotted" x1="{x}" x2="{x}" y1="4" y2="{height - 22}"/>')
    name = NAMES[grid["mode"]]
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
    return f"<figure><b>{name}</b>: what moves {layers[shown_layer(grid['layers'])]} at t{svg}</figure>"


def reach_text(diagnosis: Mapping[str, Any]) -> str:
    """Whether the grids are as the paper says."""
    broken = sum(grid["unexpected"] for grid in diagnosis["reach"])
    grid = diagnosis["reach"][0]
    carried, top = grid.get("carried", grid["layers"][-1]), grid["layers"][-1]
    rule = "Eqs. 2 and 7 say" + ("" if carried == top else f" where layer {carried} is fed back instead of the top one")
    return f"{broken} states are not as {rule} ({_why_hidden(diagnosis['reach'])})" if broken else f"as {rule}"


def _why_hidden(grids: Sequence[Mapping[str, Any]]) -> str:
    """Why states are not as the equations say, told by which they are: the plain pass shows what attention hides, without feedback."""

    def pasts(grid: Mapping[str, Any]) -> Iterator[tuple[bool, bool]]:  # (whether the source lies below the target, whether it is reached)
        for target, columns in zip(grid["layers"], grid["influence"], strict=True):
            for column in columns[:-1]:
                yield from ((source < target, value > 0) for source, value in zip(grid["layers"], column, strict=True))

    plain = [seen for grid in grids if grid["mode"] == "standard" for seen in pasts(grid)]
    soft = [seen for grid in grids if grid["mode"] != "standard" for seen in pasts(grid)]
    why = []
    if (False, True) in plain:
        why.append("without feedback, too, states are reached that layers of one pass should not reach")
    if (True, False) in plain:
        why.append("attention windows shorter than the sequence hide states, without feedback as well")
    if soft and (False, True) not in soft:
        why.append("nothing comes through the fusion, which is still closed")
    return "; ".join(why) or "without feedback all is as expected and the fusion is open: some gradients are cut or too small"
