"""Training curves by pass, over token-equivalent compute, so that models that take different numbers of passes compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullband.plots.style import LIGHT, PASS_KEYS, dash, figure, reading_label
from fullband.train.metrics import METRICS, read_metrics

MEMORY = 0.01  # of the running mean that smooths a curve: this share of the run's compute


@dataclass(frozen=True)
class Curve:
    """Loss of pass k (nats a token) where it was logged: `compute` is token-equivalent, `step` counted from 0."""

    k: int
    compute: list[int]
    step: list[int]
    loss: list[float]

    @property
    def smooth(self) -> list[float]:
        """A running mean over compute, so that passes logged seldom do not lag behind the others. It starts at the first value."""
        means: list[float] = []
        for i, loss in enumerate(self.loss):
            kept = math.exp((self.compute[i - 1] - self.compute[i]) / (MEMORY * self.compute[-1])) if i else 0.0
            means.append(kept * means[-1] + (1 - kept) * loss if i else loss)
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
                [entry[f"loss_pass_{k}"] for entry in logged],
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


def plot_curves(curves: Mapping[str, Sequence[Curve]], paths: Sequence[Path], milestones: Mapping[str, Any]) -> None:
    """Draw the curves of runs ("standard", "fullband") with switch-on and crossover of the latter."""
    with figure(paths) as (_, axes):
        for model, of_model in curves.items():
            for curve in of_model:
                key = curve_key(model, curve.k)
                compute = [x / 1e6 for x in curve.compute]
                axes.plot(compute, curve.loss, color=LIGHT[key], linewidth=0.8, alpha=0.25)
                axes.plot(compute, curve.smooth, color=LIGHT[key], linestyle=dash(key), label=curve_label(model, curve.k))
        top = 1.12 * axes.get_ylim()[1]  # room for the labels
        for place, label in ((1.0, "switch_on_step"), (0.92, "crossover_step")):
            at = compute_at(curves.get("fullband", []), milestones.get(label))
            if at is not None:
                axes.axvline(at / 1e6, color="#8a8a8a", linewidth=1, linestyle=":")
                text = "feedback on" if label == "switch_on_step" else "crossover"
                axes.text(at / 1e6, top * place, f" {text}", color="#5f5f5f", fontsize=9, va="top")
        axes.set(xlabel="token-equivalent compute, millions (tokens × passes)", ylabel="training loss, nats a token")
        axes.set_xlim(left=0)
        axes.set_ylim(0, top)
        axes.set_title("Training loss by pass")
        axes.legend(fontsize=9)
