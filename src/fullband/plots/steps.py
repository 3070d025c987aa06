"""Gradient norm and learning rates over a run's token-equivalent compute: what training curves are read with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullband.plots.chart import Axis, Line, line_chart, log_axis, ticks_within
from fullband.plots.numbers import drawn, finite
from fullband.plots.style import dashes
from fullband.training.metrics import METRICS, read_metrics

COMPUTE = "token-equivalent compute, millions"
NORM, RATE = "gradient norm", "learning rate"
RATES = {"matrix_lr": "matrices", "adam_lr": "the rest"}
RATE_DASHES = {"matrix_lr": "", "adam_lr": "6 4"}


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


def norm_lines(runs: Mapping[str, tuple[str, Steps]]) -> list[Line]:
    """A line for each run; `runs` holds (style, steps) by label."""
    return [Line(key, label, millions(own.compute), own.norm) for label, (key, own) in runs.items() if finite(own.norm)]


def rate_lines(runs: Mapping[str, tuple[str, Steps]]) -> list[Line]:
    return [
        Line(key, f"{label}, {RATES[name]}", millions(own.compute), values, dash=RATE_DASHES[name])
        for label, (key, own) in runs.items()
        for name, values in own.rates.items()
    ]


def steps_charts(runs: Mapping[str, tuple[str, Steps]]) -> str:
    """Two charts for a page; nothing for what was not logged."""
    norms, rates = norm_lines(runs), rate_lines(runs)
    return "".join(_chart(what, lines) for what, lines in ((NORM, norms), (RATE, rates)) if lines)


def _chart(what: str, lines: Sequence[Line]) -> str:
    y = log_axis(what, [value for line in lines for value in line.y])  # the rates of matrices and of the rest lie decades apart
    return line_chart(f"{what.capitalize()} by compute", lines, [], compute_axis(lines), y, low=True)


def draw_steps(norm: Any, rate: Any, runs: Mapping[str, tuple[str, Steps]], colours: Mapping[str, str]) -> None:
    """The same into two matplotlib axes."""
    for axes, lines in ((norm, norm_lines(runs)), (rate, rate_lines(runs))):
        for line in lines:
            style = dashes(line.dash or "")
            axes.plot(line.x, line.y, color=colours[line.key], linewidth=1.2, linestyle=style, label=line.label)
        if lines:
            y = log_axis("", [value for line in lines for value in line.y])
            axes.set(yscale="log", ylim=(y.low, y.high), yticks=y.ticks)
            axes.minorticks_off()
        if len(lines) > 1:
            axes.legend(fontsize=8)
    norm.set(ylabel=NORM)
    rate.set(ylabel=RATE)


def millions(compute: Sequence[float]) -> list[float]:
    return [value / 1e6 for value in compute]


def compute_axis(lines: Sequence[Line], marks: Sequence[float] = ()) -> Axis:
    """From the first value that is drawn to the last, in millions."""
    places = [x for line in lines for x in line.x] + list(marks)
    low, high = min(places), max(places)
    high = high if high > low else low + (abs(low) or 1.0)
    return Axis(COMPUTE, low, high, ticks_within(low, high), digits=2, unit=" million")
