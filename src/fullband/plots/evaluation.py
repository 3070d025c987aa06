"""Pictures of an evaluation's results.json: accuracy by feedback passes (Fig. 4), free-form scores by mode (Fig. 5), length (Fig. 6)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullband.plots.style import LIGHT, figure

COLOURS = {"standard": LIGHT["standard"], "soft": LIGHT["fused-2"], "fused": LIGHT["fused-16"]}
LABELS = {"standard": "Standard", "soft": "Soft", "fused": "Fused"}
BASELINE = LIGHT["exact"]


def plot_evaluation(results: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Draw what the results hold into `folder`, as SVG. Returns file names by what they show, in the order of the paper."""
    drawn: dict[str, str] = {}
    if results["mean"] and len(results["mean"]["readings"]) > 1:
        drawn["accuracy by feedback passes"] = _draw(plot_passes, results, folder / "figure-4.svg")
    if results["generative"]:
        drawn["free-form scores by mode"] = _draw(plot_modes, results, folder / "figure-5.svg")
    if any(own["lengths"]["median"] is not None for found in results["generative"].values() for own in found["modes"].values()):
        drawn["length of answers by mode"] = _draw(plot_lengths, results, folder / "figure-6.svg")
    return drawn


def _draw(plot: Any, results: Mapping[str, Any], path: Path) -> str:
    plot(results, path)
    return path.name


def plot_passes(results: Mapping[str, Any], path: Path) -> None:
    """Fig. 4 right: the mean over tasks, and thinly the tasks themselves."""
    mean = results["mean"]
    names = [name for name in mean["readings"] if name != "soft"]  # it is another way of reading, and has no place on the axis
    places = range(len(names))
    with figure([path], width=6.4) as (_, axes):
        for task in results["tasks"].values():
            axes.plot(places, [_percent(task["readings"][name]) for name in names], color="#c9ced6", linewidth=1, zorder=1)
        values = [mean["readings"][name] for name in names]
        axes.errorbar(
            places, [_percent(one) for one in values], yerr=[_error(one) for one in values], color=LIGHT["fused-8"], marker="o", capsize=3,
            zorder=3, label="mean of tasks",
        )  # fmt: skip
        if "baseline" in mean:
            _level(axes, mean["baseline"])
        axes.set_xticks(list(places), names)
        axes.set(xlabel="feedback passes", ylabel="accuracy, percent")
        axes.set_title(_title(results, f"{len(results['tasks'])} tasks by feedback passes"))
        axes.legend(fontsize=9)


def plot_modes(results: Mapping[str, Any], path: Path) -> None:
    """Fig. 5: one panel for each benchmark, a bar for each mode; the baseline as a level."""
    found = list(results["generative"].values())
    with figure([path], width=2.6 * len(found) + 0.8, height=3.6, rows=1, columns=len(found)) as (_, panels):
        for number, (benchmark, axes) in enumerate(zip(found, _flat(panels), strict=True)):
            for place, (mode, own) in enumerate(benchmark["modes"].items()):
                error = _error(own["score"])
                axes.bar(place, _percent(own["score"]), yerr=error or None, width=0.66, color=COLOURS[mode], capsize=3)
            if "baseline" in benchmark:
                _level(axes, benchmark["baseline"]["score"])
            axes.set_xticks(range(len(benchmark["modes"])), [LABELS[mode] for mode in benchmark["modes"]])
            axes.set_ylim(0, max(5.0, axes.get_ylim()[1]))
            axes.set_ylabel(f"Pass@{benchmark['k']}, percent")
            axes.set_title(_title(results, benchmark["label"]) if number == 0 else benchmark["label"])


def plot_lengths(results: Mapping[str, Any], path: Path) -> None:
    """Fig. 6: median tokens against the score, a point for each mode. A mode no answer of which ended has no point."""
    found = list(results["generative"].values())
    with figure([path], width=3.2 * len(found) + 0.8, height=3.6, rows=1, columns=len(found)) as (_, panels):
        for number, (benchmark, axes) in enumerate(zip(found, _flat(panels), strict=True)):
            for mode, own in benchmark["modes"].items():
                if own["lengths"]["median"] is not None:
                    where = (own["lengths"]["median"], _percent(own["score"]))
                    axes.errorbar(*where, yerr=_error(own["score"]), color=COLOURS[mode], marker="o", markersize=8, capsize=3)
                    axes.annotate(LABELS[mode], where, textcoords="offset points", xytext=(9, 4), fontsize=9)
            axes.margins(0.25)
            axes.set(xlabel="median tokens of answers that ended", ylabel=f"Pass@{benchmark['k']}, percent")
            axes.set_title(_title(results, benchmark["label"]) if number == 0 else benchmark["label"])


def _flat(panels: Any) -> list[Any]:
    return list(panels.flat) if hasattr(panels, "flat") else [panels]


def _level(axes: Any, found: Mapping[str, Any]) -> None:
    axes.axhline(_percent(found), color=BASELINE, linewidth=1.4, linestyle="--", label="baseline")


def _title(results: Mapping[str, Any], title: str) -> str:
    return f"Smoke test: {title}" if results["smoke_test"] else title


def _percent(found: Mapping[str, Any]) -> float:
    return 100 * float(found["value"])


def _error(found: Mapping[str, Any]) -> float:
    error = found["error"]
    return 0.0 if error is None or error != error else 100 * float(error)
