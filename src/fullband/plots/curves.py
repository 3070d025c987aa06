"""Training curves by pass, over token-equivalent compute, so that models that take different numbers of passes compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullband.plots.chart import Axis, Line, Mark, line_chart, nice_ticks
from fullband.plots.numbers import drawn, finite
from fullband.plots.style import LIGHT, PASS_KEYS, dash, figure, reading_label
from fullband.train.metrics import METRICS, read_metrics

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


def plot_curves(curves: Mapping[str, Sequence[Curve]], paths: Sequence[Path], milestones: Mapping[str, Any]) -> None:
    """Draw the curves of runs ("standard", "fullband") with switch-on, shock and crossover of the latter."""
    with figure(paths, width=9.4) as (drawing, axes):
        for model, of_model in curves.items():
            for curve in of_model:
                key = curve_key(model, curve.k)
                compute = [x / 1e6 for x in curve.compute]
                axes.plot(compute, curve.loss, color=LIGHT[key], linewidth=0.8, alpha=0.25)
                axes.plot(compute, curve.smooth, color=LIGHT[key], linestyle=dash(key), label=curve_label(model, curve.k))
        top, furthest = 1.14 * axes.get_ylim()[1], axes.get_xlim()[1]  # room for the labels
        for number, (at, label) in enumerate(marks_of(curves, milestones)):
            late = at / 1e6 > 0.6 * furthest
            axes.axvline(at / 1e6, color="#8a8a8a", linewidth=1, linestyle=":")
            place = (at / 1e6, top * (1 - 0.06 * number))
            clear = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            shown = f"{label} " if late else f" {label}"
            axes.text(*place, shown, color="#5f5f5f", fontsize=9, va="top", ha="right" if late else "left", bbox=clear)
        axes.set(xlabel="token-equivalent compute, millions (tokens × passes)", ylabel="training loss, nats a token")
        axes.set_xlim(left=0)
        axes.set_ylim(0, top)
        axes.set_title("Training loss by pass")
        drawing.legend(loc="outside right upper", fontsize=9)


def curves_chart(curves: Mapping[str, Sequence[Curve]], milestones: Mapping[str, Any]) -> str:
    """The same for a page, with the values under the pointer."""
    lines = [
        Line(curve_key(model, curve.k), curve_label(model, curve.k), [x / 1e6 for x in curve.compute], curve.smooth, faint=curve.loss)
        for model, of_model in curves.items()
        for curve in of_model
    ]
    marks = [Mark(label, x=at / 1e6, row=row) for row, (at, label) in enumerate(marks_of(curves, milestones))]
    furthest = max(line.x[-1] for line in lines)
    highest = max(finite(y for line in lines for y in line.y), default=1.0) * 1.12
    x = Axis("token-equivalent compute, millions", 0, furthest, nice_ticks(furthest), digits=2, unit=" million")
    y = Axis("loss, nats a token", 0, highest, nice_ticks(highest), digits=3)
    return line_chart("Training loss by pass", lines, marks, x, y)
