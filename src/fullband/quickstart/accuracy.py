"""Both models at lengths they were never trained on, in every way the quickstart compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullband.config import Recipe, TaskSource
from fullband.data.tasks import build_task
from fullband.evaluate.loss import PositionAccuracy, accuracy_by_position
from fullband.feedback.by_passes import top_states
from fullband.feedback_config import FeedbackPasses
from fullband.model import FullBandModel
from fullband.quickstart.recipes import POSITIONS

FEEDBACK_PASSES: tuple[FeedbackPasses, ...] = (0, 1, 2, 4, 8, 16, "exact")
EXAMPLE_POSITIONS = 24


@dataclass(frozen=True)
class Readings:
    """`accuracy` by evaluation ("standard", "fused-0", …, "exact"), all on the same rows; `example` is one of them, answer by answer."""

    accuracy: dict[str, PositionAccuracy]
    rows: int
    chance: float
    example: dict[str, Any]

    def at_positions(self, what: str) -> dict[str, dict[str, float]]:
        """{evaluation: {"8": …, "16": …}}, of "accuracy_T" or "stderr_T", positions counted from 1."""
        return {
            name: {str(position): float(getattr(reading, what)[position - 1]) for position in POSITIONS}
            for name, reading in self.accuracy.items()
        }


def reading_name(passes: FeedbackPasses) -> str:
    return "exact" if passes == "exact" else f"fused-{passes}"


def read_models(standard: Path, fullband: Path, recipe: Recipe, rows: int) -> Readings:
    """Read `rows` held-out rows of 64 positions: the standard model plain, the full-bandwidth one with each of FEEDBACK_PASSES."""
    assert isinstance(recipe.data.source, TaskSource)
    task = build_task(recipe.data.source)
    held_out = task.examples(recipe.seed, "validation", 0, rows, POSITIONS[-1])
    models = {"standard": FullBandModel.load(standard), "fullband": FullBandModel.load(fullband)}
    ways: list[tuple[str, FullBandModel, FeedbackPasses]] = [("standard", models["standard"], 0)]
    ways += [(reading_name(passes), models["fullband"], passes) for passes in FEEDBACK_PASSES]
    accuracy = {
        name: accuracy_by_position(model, held_out.tokens, held_out.targets, passes, batch_rows=256) for name, model, passes in ways
    }
    first = held_out.tokens[:1, :EXAMPLE_POSITIONS]
    example = {
        "tokens": [task.names[token] for token in first[0].tolist()],
        "right": held_out.targets[0, :EXAMPLE_POSITIONS].tolist(),
        "standard": answers(models["standard"], first, 0),
        "exact": answers(models["fullband"], first, "exact"),
    }
    return Readings(accuracy, rows, task.chance, example)


@torch.no_grad()
def answers(model: FullBandModel, tokens: torch.Tensor, passes: FeedbackPasses) -> Sequence[int]:
    """The most likely answer at each position of one row [1, T]."""
    return [int(answer) for answer in model.trunk.head(top_states(model, tokens, passes)).argmax(-1)[0]]
