"""Validation during training: loss by feedback passes on held-out rows."""

from __future__ import annotations

import torch

from fullband.data.batch import Batch
from fullband.device import autocast
from fullband.feedback.by_passes import states_by_passes
from fullband.feedback.loss import token_losses
from fullband.feedback_config import FeedbackPasses
from fullband.loading import LoadedModel


@torch.no_grad()
def validation_losses(
    model: LoadedModel, batches: list[Batch], feedback_passes: list[FeedbackPasses], dtype: str = "float32"
) -> dict[str, float]:
    """{"0": nats, "1": …, "exact": …}: mean cross-entropy over the scored positions of `batches`."""
    totals = dict.fromkeys(feedback_passes, 0.0)
    for batch in (batch.to(model.trunk.device) for batch in batches):
        with autocast(model.trunk.device, dtype):
            for passes, states_BTD in states_by_passes(model, batch.tokens, feedback_passes, batch.layout):
                nll, _ = token_losses(states_BTD.flatten(0, 1), model.trunk.head_weight, batch.targets.flatten())
                totals[passes] += float(nll.sum())
    count = max(1, sum(batch.counted for batch in batches))
    return {str(passes): total / count for passes, total in totals.items()}
