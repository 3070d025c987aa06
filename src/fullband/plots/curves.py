"""Training curves by pass, over token-equivalent compute, so that models that take different numbers of passes compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullband.plots.chart import Line, Mark, line_chart, near_axis
from fullband.plots.numbers import drawn
from fullband.plots.steps import Steps, compute_axis, draw_steps, millions, steps_charts
from fullband.plots.style import LIGHT, PASS_KEYS, dash, figure, reading_label
from fullband.training.metrics import METRICS, read_metrics

MEMORY = 0.01  # of the running mean that smooths a curve: this share of the run's compute


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
    curves = []
    for k in range(1, deepest + 1):
        logged = [entry for entry in entries if entry["passes"] >= k]
        curves.append(
            Curve(
                k,
                [entry["token_equivalent_compute"] for entry in logged],
                [entry["step"] for entry in logged],
                drawn(entry[f"loss_pass_{k}"] for entry in logged),
            )
        )
    return curves


def compute_at(curves: Sequence[Curve], step: int | None) -> float | None:
    """Token-equivalent compute at `step`, between the steps that were logged."""
    if step is None or not curves:
        return None
    steps, compute = [-1, *curves[0].step], [0, *curves[0].compute]
    for (a, x), (b, y) in zip(zip(steps, compute, strict=True), zip(steps[1:], compute[1:], strict=True), strict=False):
        if step <= b:
            return x + (y - x) * (step - a) / (b - a)
    return float(compute[-1])


def curve_key(model: str, k: int) -> str:
    """The style of pass k of a model, as a way of reading; deeper passes look like the third."""
    return "standard" if model == "standard" else PASS_KEYS[min(k, max(PASS_KEYS))]


def curve_label(model: str, k: int) -> str:
    return reading_label(model) if model == "standard" else f"full-band, pass {k}{' (plain)' if k == 1 else ''}"


def marks_of(curves: Mapping[str, Sequence[Curve]], milestones: Mapping[str, Any]) -> list[tuple[float, str]]:
    """(token-equivalent compute, label) of switch-on, with its shock if that is known, and crossover of the full-band run."""
    shock = milestones.get("switch_on_shock")
    size = "" if shock is None else f", shock {round(shock, 2) + 0.0:+.2f} nats"  # + 0.0: never "-0.00"
    words = {"switch_on_step": f"feedback on{size}", "crossover_step": "crossover"}
    places = [(compute_at(curves.get("fullband", []), milestones.get(key)), label) for key, label in words.items()]
    return [(at, label) for at, label in places if at is not None]


ROOM = 0.14  # of the losses' range, above them, for labels


def plot_curves(
    curves: Mapping[str, Sequence[Curve]], paths: Sequence[Path], milestones: Mapping[str, Any], steps: Mapping[str, Steps]
) -> None:
    """Draw the curves of runs ("standard", "fullband") with switch-on, shock and crossover of the latter; below them, the runs' gradient
    norms and learning rates (`steps`, by run). The axes begin at the data."""
    with figure(paths, width=9.4, height=7.2, rows=3, columns=1, heights=(3.4, 1, 1)) as (drawing, panels):
        axes, norm, rate = panels[:, 0]
        for model, of_model in curves.items():
            for curve in of_model:
                key = curve_key(model, curve.k)
                compute = millions(curve.compute)
                axes.plot(compute, curve.loss, color=LIGHT[key], linewidth=0.8, alpha=0.25)
                axes.plot(compute, curve.smooth, color=LIGHT[key], linestyle=dash(key), label=curve_label(model, curve.k))
        marks = marks_of(curves, milestones)
        shown = lines_of(curves)
        x = compute_axis(shown, [at / 1e6 for at, _ in marks])
        y = near_axis("loss", [value for line in shown for value in line.y], above=ROOM)
        for number, (at, label) in enumerate(marks):
            late = x.share(at / 1e6) > 0.6
            for panel in (axes, norm, rate):
                panel.axvline(at / 1e6, color="#8a8a8a", linewidth=1, linestyle=":")
            place = (at / 1e6, y.high - 0.06 * number * (y.high - y.low))
            clear = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            text = f"{label} " if late else f" {label}"
            axes.text(*place, text, color="#5f5f5f", fontsize=9, va="top", ha="right" if late else "left", bbox=clear)
        draw_steps(norm, rate, steps_by_label(steps), LIGHT)
        for panel in (axes, norm, rate):
            panel.set_xlim(x.low, x.high)
        axes.set(ylabel="training loss, nats a token", ylim=(y.low, y.high), title="Training loss by pass")
        rate.set_xlabel("token-equivalent compute, millions (tokens × passes)")
        drawing.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=9)


def lines_of(curves: Mapping[str, Sequence[Curve]]) -> list[Line]:
    """Running means, with the logged values behind them."""
    return [
        Line(curve_key(model, curve.k), curve_label(model, curve.k), millions(curve.compute), curve.smooth, faint=curve.loss)
        for model, of_model in curves.items()
        for curve in of_model
    ]


def steps_by_label(steps: Mapping[str, Steps]) -> dict[str, tuple[str, Steps]]:
    return {reading_label(model): (curve_key(model, 1), own) for model, own in steps.items()}


def curves_chart(curves: Mapping[str, Sequence[Curve]], milestones: Mapping[str, Any]) -> str:
    """The losses for a page, with the values under the pointer."""
    lines = lines_of(curves)
    marks = [Mark(label, x=at / 1e6, row=row) for row, (at, label) in enumerate(marks_of(curves, milestones))]
    x = compute_axis(lines, [mark.x for mark in marks if mark.x is not None])
    y = near_axis("loss, nats a token", [value for line in lines for value in line.y], above=ROOM)
    return line_chart("Training loss by pass", lines, marks, x, y)


def curves_charts(curves: Mapping[str, Sequence[Curve]], milestones: Mapping[str, Any], steps: Mapping[str, Steps]) -> str:
    """Losses, gradient norms and learning rates for a page."""
    return curves_chart(curves, milestones) + steps_charts(steps_by_label(steps))
