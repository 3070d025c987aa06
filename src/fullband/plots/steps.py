"""Gradient norm and learning rates over a run's token-equivalent compute, to be shown below its training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullband.plots.chart import Axis, Chart, Line, log_axis, ticks_within
from fullband.plots.numbers import drawn, finite
from fullband.training.metrics import METRICS, read_metrics

COMPUTE = "token-equivalent compute, millions"
RATES = {"matrix_lr": ("matrices", ""), "adam_lr": ("the rest", "6 4")}  # their names in words, their dashes


@dataclass(frozen=True)
class Steps:
    """By logged step: `compute` is token-equivalent; the norm is that of all gradients together; the rates go by their names in
    metrics.jsonl. What a step does not say, or is not finite, is NaN."""

    compute: list[int] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)


def steps_of(entries: Sequence[Mapping[str, Any]]) -> Steps:
    """From the entries of a metrics.jsonl."""
    steps = [entry for entry in entries if "objective" in entry]
    rates = {name: drawn(_number(step.get(name)) for step in steps) for name in RATES}
    return Steps(
        [step["token_equivalent_compute"] for step in steps],
        drawn(_number(step.get("gradient_norm")) for step in steps),
        {name: values for name, values in rates.items() if finite(values)},
    )


def read_steps(folder: Path) -> Steps:
    """Of a run folder's metrics.jsonl."""
    return steps_of(read_metrics(folder / METRICS))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def steps_charts(runs: Mapping[str, tuple[str, Steps]]) -> tuple[Chart, Chart]:
    """Gradient norms and learning rates; `runs` holds (style, steps) by label. What was not logged has no lines."""
    norms = [Line(key, label, millions(own.compute), own.norm) for label, (key, own) in runs.items() if finite(own.norm)]
    rates = [
        Line(key, f"{label}, {RATES[name][0]}", millions(own.compute), values, dash=RATES[name][1])
        for label, (key, own) in runs.items()
        for name, values in own.rates.items()
    ]
    return _chart("gradient norm", norms), _chart("learning rate", rates)


def steps_html(runs: Mapping[str, tuple[str, Steps]]) -> str:
    """The charts for a page; nothing for what was not logged."""
    return "".join(chart.html() for chart in steps_charts(runs) if chart.lines)


def _chart(what: str, lines: Sequence[Line]) -> Chart:
    y = log_axis(what, [value for line in lines for value in line.y])  # the rates of matrices and of the rest lie decades apart
    return Chart(f"{what.capitalize()} by compute", lines, compute_axis(lines), y, low=True)


def millions(compute: Sequence[float]) -> list[float]:
    return [value / 1e6 for value in compute]


def compute_axis(lines: Sequence[Line], marks: Sequence[float] = ()) -> Axis:
    """From the first value that is drawn to the last, in millions."""
    places = [x for line in lines for x in line.x] + list(marks) or [0.0]
    low, high = min(places), max(places)
    high = high if high > low else low + (abs(low) or 1.0)
    return Axis(COMPUTE, low, high, ticks_within(low, high), digits=2, unit=" million")
