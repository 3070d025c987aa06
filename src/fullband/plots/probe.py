"""Fig. 7 from a probe's results: accuracy by depth (a), and several registers (b)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullband.plots.numbers import drawn, finite
from fullband.plots.style import LIGHT, dash, draw_chance, figure

KEYS = {"standard": "standard", "1": "fused-1", "2": "fused-4", "4": "fused-16", "full": "exact"}  # more steps are darker
MARKERS = {"standard": "s", "1": "o", "2": "^", "4": "D", "full": "v"}
LABELS = {
    "standard": "standard prefill",
    "1": "recurrent, 1 step",
    "2": "recurrent, 2 steps",
    "4": "recurrent, 4 steps",
    "full": "full recurrence",
}
CHANCE = 0.5  # a probe tells two values apart
TITLES = {"completion": "Completion tracking", "memory": "Delayed memory"}
SUFFIXES = (".png", ".svg")

Plot = Callable[[Sequence[dict[str, Any]], Sequence[Path]], None]


def parts_of(result: Mapping[str, Any]) -> list[tuple[str, str, list[dict[str, Any]], Plot]]:
    """(number, title, settings, how it is drawn) of the parts of Fig. 7 that the results hold."""
    single = [setting for setting in result["settings"] if setting["task"] in TITLES]
    registers = [setting for setting in result["settings"] if setting["task"] == "registers"]
    parts = [("7a", "what each depth knows", single, plot_depths), ("7b", "several registers", registers, plot_registers)]
    return [part for part in parts if part[2]]


def plot_probe(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the results hold into `folder`: figure-7a and figure-7b, PNG and SVG. Returns the files."""
    files = []
    for part, _, settings, plot in parts_of(result):
        own = [folder / f"figure-{part}{suffix}" for suffix in SUFFIXES]
        plot(settings, own)
        files += own
    return files


def plot_depths(settings: Sequence[dict[str, Any]], paths: Sequence[Path]) -> None:
    """Fig. 7a: one panel for each task, decodability above and, below it, whether the model's answer follows the stream."""
    low = _lowest(settings)
    with figure(paths, width=3.6 * len(settings) + 2.4, height=6.4, rows=2, columns=len(settings)) as (drawing, panels):
        for column, setting in enumerate(settings):
            above, below = panels[0][column], panels[1][column]
            _by_depth(above, setting, "accuracy", "stderr")
            _by_depth(below, setting, "moved")
            _chance(above, low)
            above.set_title(TITLES[setting["task"]])
            below.set(xlabel="depth (0 = input of the stack)", ylim=(-0.04, 1.04))
            if column == 0:
                above.set_ylabel("probe accuracy, held-out groups")
                below.set_ylabel("answers moved by a swap")
        _legend(drawing, panels[0][0])


def plot_registers(settings: Sequence[dict[str, Any]], paths: Sequence[Path]) -> None:
    """Fig. 7b: accuracy at the stack's input by number of registers, by writes a register, and by depth for eight registers."""
    swept = [setting for setting in settings if setting["registers"] * setting["writes_each"] == 16]
    overwritten = [setting for setting in settings if setting["registers"] == 8]
    middle = len(settings[0]["prefills"][0]["depths"]) // 2
    low = _lowest(settings)
    with figure(paths, width=10.4, height=6.4, rows=2, columns=3) as (drawing, panels):
        for row, depth in enumerate((0, middle)):
            for axes, chosen, key, label in (
                (panels[row][0], swept, "registers", "registers m (16 writes in all)"),
                (panels[row][1], overwritten, "writes_each", "writes a register (m = 8)"),
            ):
                places = [setting[key] for setting in chosen]
                for number, prefill in enumerate(settings[0]["prefills"]):
                    found = [setting["prefills"][number]["depths"][depth] for setting in chosen]
                    _line(axes, prefill["prefill"], places, found, "accuracy", "stderr")
                _chance(axes, low)
                axes.set_xscale("log", base=2)
                axes.set_xticks(places, [str(place) for place in places])
                axes.minorticks_off()
                axes.set_xlabel(label)
            panels[row][0].set_ylabel(f"probe accuracy at depth {depth}")
        if not overwritten:  # a probe that was interrupted before it came to eight
            for axes in panels[:, 1:].flat:
                axes.set_visible(False)
        for axes, setting in zip((panels[0][2], panels[1][2]), overwritten[:1] + overwritten[-1:], strict=False):
            _by_depth(axes, setting, "accuracy", "stderr")
            _chance(axes, low)
            axes.set(xlabel=f"depth (m = 8, {setting['writes_each']} writes each)", ylabel="probe accuracy")
        panels[0][0].set_title("By registers")
        panels[0][1].set_title("By writes")
        panels[0][2].set_title("By depth")
        _legend(drawing, panels[0][0])


def _by_depth(axes: Any, setting: dict[str, Any], key: str, error: str | None = None) -> None:
    for prefill in setting["prefills"]:
        depths = [found["depth"] for found in prefill["depths"]]
        _line(axes, prefill["prefill"], depths, prefill["depths"], key, error)
    axes.set_xticks(depths[:: -(-len(depths) // 9)])


def _line(axes: Any, name: str, places: Sequence[float], found: Sequence[dict[str, Any]], key: str, error: str | None = None) -> None:
    axes.errorbar(
        places,
        drawn(point[key] for point in found),
        yerr=[point[error] for point in found] if error else None,
        color=LIGHT[KEYS[name]],
        linestyle=dash(KEYS[name]),
        marker=MARKERS[name],
        markersize=4.5,
        capsize=2,
        label=LABELS[name],
    )


def _lowest(settings: Sequence[dict[str, Any]]) -> float:
    """The lower end of the accuracy axis: a little under chance, or under what lies below that."""
    points = [point for setting in settings for prefill in setting["prefills"] for point in prefill["depths"]]
    return min([0.42, *finite(point["accuracy"] - point["stderr"] - 0.02 for point in points)])


def _chance(axes: Any, low: float) -> None:
    draw_chance(axes, CHANCE)
    axes.set_ylim(low, 1.04)


def _legend(drawing: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside right upper", fontsize=9)
