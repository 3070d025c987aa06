"""Scale over long rollouts, the response to a perturbation, and the pass after which each position has arrived at exact reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullband.plots.numbers import drawn, finite
from fullband.plots.style import LIGHT, dash, figure

ROLLOUT_KEYS = {"state": {"greedy": "fused-8", "sampled": "fused-1"}, "input": {"greedy": "standard", "sampled": "fused-0"}}
ROLLOUT_LABELS = {"state": "top states", "input": "inputs of the stack"}
RESPONSE_KEYS = {"along positions": "exact", "over passes": "fused-8"}


def rollout_name(rollout: Mapping[str, Any]) -> str:
    return "greedy" if rollout["temperature"] == 0 else "sampled"


def rollout_lines(diagnosis: Mapping[str, Any]) -> list[tuple[str, str, list[int], list[float]]]:
    """(label, style, generated tokens, root mean square) of states and inputs of every rollout; NaN where it is not finite."""
    return [
        (f"{label}, {name}", ROLLOUT_KEYS[what][name], rollout["places"], drawn(rollout[f"{what}_rms"]))
        for rollout in diagnosis["rollouts"]
        for name in [rollout_name(rollout)]
        for what, label in ROLLOUT_LABELS.items()
    ]


def plot_rollouts(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Root mean square of states and inputs over generated tokens."""
    with figure(paths, width=8.6) as (drawing, axes):
        for label, key, places, values in rollout_lines(diagnosis):
            axes.plot(places, values, color=LIGHT[key], linestyle=dash(key), linewidth=1.6, label=label)
        axes.set(xlabel="generated token", ylabel="root mean square", title="Scale over a rollout")
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        drawing.legend(loc="outside lower center", ncols=4, fontsize=9)


def plot_response(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Relative distance after a nudge of size σ."""
    found = diagnosis["perturbation"]
    with figure(paths, width=8.6) as (drawing, axes):
        for label, response in responses(found).items():
            distance = [value if value > 0 else float("nan") for value in drawn(response["distance"])]
            growth = "" if not finite([response["growth"]]) else f" (x {response['growth']:.2f} in each)"
            named = f"{label}{growth}"
            axes.plot(range(len(distance)), distance, color=LIGHT[RESPONSE_KEYS[label]], label=named)
        axes.set_yscale("log")
        if any(finite(response["distance"]) for response in responses(found).values()):
            axes.axhline(found["sigma"], color="#8a8a8a", linewidth=1, linestyle=":")
            axes.text(1.0, found["sigma"], "σ", color="#5f5f5f", fontsize=9, va="center", ha="left", transform=axes.get_yaxis_transform())
        axes.set(xlabel="positions or passes after the nudge", ylabel="relative distance", title="Response to a perturbation")
        drawing.legend(loc="outside lower center", ncols=2, fontsize=9)


def plot_arrival(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """The pass after which a position stays within the tolerance of exact reading."""
    trace = diagnosis["trace"]
    arrival = trace["arrival"]
    with figure(paths, width=8.6) as (drawing, axes):
        for label, key, passes in (("median over rows", "fused-8", arrival["median"]), ("90th percentile", "fused-1", arrival["p90"])):
            axes.plot(arrival["positions"], drawn(passes), color=LIGHT[key], label=label)
        last = trace["records"][-1]["k"]
        bound = [t for t in arrival["positions"] if t + 1 <= last]
        axes.plot(bound, [t + 1 for t in bound], color=LIGHT["standard"], linestyle=":", label="the latest possible, t + 1")
        axes.set(xlabel="position t", ylabel="passes", title=f"Passes until within {trace['tolerance']:g} of exact evaluation")
        axes.set_ylim(0, 1.05 * last)
        drawing.legend(loc="outside lower center", ncols=3, fontsize=9)


def responses(perturbation: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = {"along positions": perturbation["along_positions"], "over passes": perturbation["over_passes"]}
    return {label: response for label, response in found.items() if response is not None}
