"""Scale over long rollouts, and the response to a perturbation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullband.plots.chart import Axis, Chart, Line, Mark, log_axis, nice_ticks
from fullband.plots.numbers import finite, number
from fullband.plots.picture import draw_chart
from fullband.plots.style import figure

ROLLOUT_LINES = (  # (what is measured, its label, its style in a greedy rollout, in a sampled one)
    ("state", "top states", "fused-8", "fused-1"),
    ("input", "inputs of the stack", "standard", "fused-0"),
)
RESPONSES = (("along_positions", "along positions", "exact"), ("over_passes", "over passes", "fused-8"))


def is_greedy(rollout: Mapping[str, Any]) -> bool:
    return bool(rollout["temperature"] == 0)


def rollout_name(rollout: Mapping[str, Any]) -> str:
    return "greedy" if is_greedy(rollout) else "sampled"


def rollouts_chart(rollouts: Sequence[Mapping[str, Any]]) -> Chart:
    """Root mean square of states and inputs over generated tokens, of every rollout."""
    lines = [
        Line(greedy if is_greedy(rollout) else sampled, f"{label}, {rollout_name(rollout)}", rollout["places"], rollout[f"{what}_rms"])
        for rollout in rollouts
        for what, label, greedy, sampled in ROLLOUT_LINES
    ]
    high = max(finite(value for line in lines for value in line.y), default=1.0) * 1.1
    last = rollouts[0]["tokens"]
    x = Axis("generated token", 0, last, nice_ticks(last), prefix="token ")
    return Chart("Scale over a rollout", lines, x, Axis("root mean square", 0, high, nice_ticks(high), digits=3))


def response_chart(perturbation: Mapping[str, Any]) -> Chart:
    """Relative distance after a nudge of size σ. A distance of 0 has no place on a logarithmic axis."""
    found = [(label, key, perturbation[what]) for what, label, key in RESPONSES if perturbation[what] is not None]
    lines = [
        Line(key, f"{label} x {number(one['growth'])} in each", range(len(one["distance"])), [value or None for value in one["distance"]])
        for label, key, one in found
    ]
    furthest = max(len(line.x) for line in lines) - 1
    x = Axis("positions or passes after the nudge", 0, furthest, nice_ticks(furthest), prefix="after ")
    y = log_axis("relative distance", [perturbation["sigma"], *(value for line in lines for value in line.y)])
    return Chart("Response to a perturbation", lines, x, y, [Mark("σ", y=perturbation["sigma"])])


def plot_rollouts(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    _plot(rollouts_chart(diagnosis["rollouts"]), paths)


def plot_response(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    _plot(response_chart(diagnosis["perturbation"]), paths)


def _plot(chart: Chart, paths: Sequence[Path]) -> None:
    with figure(paths, width=8.6) as (drawing, axes):
        draw_chart(axes, chart)
        axes.set_title(chart.title)
        drawing.legend(loc="outside lower center", ncols=4, fontsize=9)
