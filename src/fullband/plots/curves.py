"""Training curves by pass, over token-equivalent compute, so that models that take different numbers of passes compare; below them,
gradient norms and learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fullband.plots.chart import Axis, Chart, Line, Mark, log_axis, near_axis, ticks_within
from fullband.plots.numbers import drawn, finite
from fullband.plots.picture import draw_chart, draw_mark
from fullband.plots.style import PASS_KEYS, figure, series_label
from fullband.training.metrics import METRICS, read_metrics

ROOM = 0.14  # of the losses' range, above them, for labels
MEMORY = 0.01  # of the running mean that smooths a curve: this share of the run's compute
COMPUTE = "token-equivalent compute, millions"
RATES = {"matrix_lr": ("matrices", ""), "adam_lr": ("the rest", "6 4")}  # their names in words, their dashes


@dataclass(frozen=True)
class Curve:
    """Loss of pass k (nats a token) where it was logged: `compute` is token-equivalent, `step` counted from 0. A loss that is not finite
    is NaN."""

    k: int
    compute: list[int]
    step: list[int]
    loss: list[float]

    @property
    def smooth(self) -> list[float]:
        """A running mean over compute, so that passes logged seldom do not lag behind the others. It starts at the first finite value,
        and leaves out those that are not."""
        means: list[float] = []
        mean = before = math.nan
        for compute, loss in zip(self.compute, self.loss, strict=True):
            if math.isfinite(loss):
                kept = math.exp((before - compute) / (MEMORY * self.compute[-1]))
                mean, before = loss if math.isnan(mean) else kept * mean + (1 - kept) * loss, compute
            means.append(mean if math.isfinite(loss) else math.nan)
        return means


def read_curves(folder: Path) -> list[Curve]:
    """The curves of a run folder's metrics.jsonl, one for each pass that was trained."""
    entries = [entry for entry in read_metrics(folder / METRICS) if "objective" in entry]
    deepest = max((entry["passes"] for entry in entries), default=0)
    return [_curve(k, [entry for entry in entries if entry["passes"] >= k]) for k in range(1, deepest + 1)]


def _curve(k: int, logged: Sequence[Mapping[str, Any]]) -> Curve:
    compute, steps = ([entry[key] for entry in logged] for key in ("token_equivalent_compute", "step"))
    return Curve(k, compute, steps, drawn(entry[f"loss_pass_{k}"] for entry in logged))


def compute_at(curves: Sequence[Curve], step: int | None) -> float | None:
    """Token-equivalent compute at `step`, between the steps that were logged."""
    if step is None or not curves:
        return None
    return float(np.interp(step, [-1, *curves[0].step], [0, *curves[0].compute]))


def curve_key(model: str, k: int) -> str:
    """The style of pass k of a model; deeper passes look like the third."""
    return "standard" if model == "standard" else PASS_KEYS[min(k, max(PASS_KEYS))]


def curve_label(model: str, k: int) -> str:
    return series_label(model) if model == "standard" else f"full-band, pass {k}{' (without feedback)' if k == 1 else ''}"


def marks_of(curves: Mapping[str, Sequence[Curve]], milestones: Mapping[str, Any]) -> list[Mark]:
    """Switch-on, with its shock if that is known, and crossover of the full-band run, over millions of token-equivalent compute."""
    shock = milestones.get("switch_on_shock")
    size = "" if shock is None else f", shock {round(shock, 2) + 0.0:+.2f} nats"  # + 0.0: never "-0.00"
    words = {"switch_on_step": f"feedback on{size}", "crossover_step": "crossover"}
    places = [(compute_at(curves.get("fullband", []), milestones.get(key)), label) for key, label in words.items()]
    found = [(at / 1e6, label) for at, label in places if at is not None]
    return [Mark(label, x=at, row=row) for row, (at, label) in enumerate(found)]


def loss_chart(curves: Mapping[str, Sequence[Curve]], milestones: Mapping[str, Any]) -> Chart:
    """Losses of runs ("standard", "fullband"): running means, with the logged values under them. The axes begin at the data."""
    lines = [
        Line(curve_key(model, curve.k), curve_label(model, curve.k), millions(curve.compute), curve.smooth, faint=curve.loss)
        for model, of_model in curves.items()
        for curve in of_model
    ]
    marks = marks_of(curves, milestones)
    x = compute_axis(lines, [mark.x for mark in marks if mark.x is not None])
    y = near_axis("training loss, nats a token", [value for line in lines for value in line.y], above=ROOM)
    return Chart("Training loss by pass", lines, x, y, marks)


def plot_curves(
    curves: Mapping[str, Sequence[Curve]], paths: Sequence[Path], milestones: Mapping[str, Any], steps: Mapping[str, Steps]
) -> None:
    """Draw the losses with switch-on, shock and crossover; below them, the runs' gradient norms and learning rates (`steps`, by run)."""
    losses = loss_chart(curves, milestones)
    with figure(paths, width=9.4, height=7.2, rows=3, columns=1, heights=(3.4, 1, 1)) as (drawing, panels):
        top, *below = panels[:, 0]
        for axes, chart in zip(below, steps_charts(steps_by_label(steps)), strict=True):
            for mark in losses.marks:
                draw_mark(axes, Mark("", x=mark.x), right=False)
            if chart.lines:
                draw_chart(axes, chart)
            if len(chart.lines) > 1:
                axes.legend(fontsize=8)
            axes.set(xlim=(losses.x.low, losses.x.high), xlabel="", ylabel=chart.y.label)
        draw_chart(top, losses)
        top.set(title=losses.title, xlabel="")
        below[-1].set_xlabel("token-equivalent compute, millions (tokens × passes)")
        drawing.legend(*top.get_legend_handles_labels(), loc="outside right upper", fontsize=9)


def steps_by_label(steps: Mapping[str, Steps]) -> dict[str, tuple[str, Steps]]:
    return {series_label(model): (curve_key(model, 1), own) for model, own in steps.items()}


def curves_html(curves: Mapping[str, Sequence[Curve]], milestones: Mapping[str, Any], steps: Mapping[str, Steps]) -> str:
    """Losses, gradient norms and learning rates for a page."""
    return loss_chart(curves, milestones).html() + steps_html(steps_by_label(steps))


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
