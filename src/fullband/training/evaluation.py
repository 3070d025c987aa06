"""Validation during training: loss by feedback passes on held-out rows."""

from __future__ import annotations

import torch

from fullband.config import FeedbackPasses
from fullband.data.batch import Batch
from fullband.feedback.loss import token_losses
from fullband.feedback.passes import read
from fullband.loading import LoadedModel
from fullband.training.step import autocast, single_document


@torch.no_grad()
def validation_losses(
    model: LoadedModel, batches: list[Batch], feedback_passes: list[FeedbackPasses], dtype: str = "float32"
) -> dict[str, float]:
    """{"0": nats, "1": …, "exact": …}: mean cross-entropy over the scored positions of `batches`."""
    device = model.trunk.head_weight.device
    losses = {}
    for passes in feedback_passes:
        total, count = 0.0, 0
        for batch in batches:
            on_device = batch.to(device)
            with autocast(device, dtype):
                states = read(model, on_device.tokens, passes, on_device.positions, single_document(on_device.documents), on_device.plain)
                nll, _ = token_losses(states.flatten(0, 1), model.trunk.head_weight, on_device.targets.flatten())
            total += float(nll.sum())
            count += batch.counted
        losses[str(passes)] = total / max(1, count)
    return losses
