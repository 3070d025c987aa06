"""One optimizer step: microbatches through the passes, Eq. 12, and what is worth knowing about it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fullband.config import TrainConfig
from fullband.data.batch import Batch
from fullband.device import autocast
from fullband.feedback.loss import PassLoss, multipass_loss
from fullband.feedback.schedule import PassSchedule
from fullband.feedback.scheduled import run_scheduled_passes
from fullband.loading import LoadedModel


@dataclass
class StepReport:
    """Sums over the step's microbatches. `losses[k-1]` belongs to pass k; all losses are means in nats."""

    passes: int
    tokens: int
    executed_positions: int = 0  # positions the trunk really computed: prefix reuse computes fewer than tokens × passes
    objective: float = 0.0
    gradient_norm: float = 0.0
    sums: list[PassLoss] = field(default_factory=list)

    @property
    def token_equivalent(self) -> int:
        """Tokens × passes (section 4's accounting)."""
        return self.tokens * self.passes

    def add(self, passes: list[PassLoss]) -> None:
        self.sums = [_plus(a, b) for a, b in zip(self.sums, passes, strict=True)] if self.sums else passes

    def losses(self) -> dict[str, float]:
        """Mean loss of every pass, and of passes k ≥ 2 against pass 1 over the same fused positions."""
        named = {}
        for k, loss in enumerate(self.sums, start=1):
            named[f"loss_pass_{k}"] = _mean(loss.total, loss.count)
            if k > 1:
                named[f"fused_pass_{k}"] = _mean(loss.fused, loss.fused_count)
                named[f"plain_there_{k}"] = _mean(loss.plain_there, loss.fused_count)
        return named


def accumulate_gradients(
    model: LoadedModel,
    batch: Batch,
    step: int,
    schedule: PassSchedule,
    config: TrainConfig,
    z_loss: float,
) -> StepReport:
    """Forward and backward over the microbatches of `batch`; gradients are added to the parameters'.

    Every sum is divided once, by the step's number of scored targets, so the split into microbatches does not matter (law 9).
    """
    device = model.trunk.device
    rows_per_microbatch = config.microbatch_rows or batch.tokens.shape[0]
    scored = max(1, batch.counted)
    report = StepReport(schedule.passes(step), tokens=batch.tokens.numel())
    for index, micro in enumerate(batch.split(rows_per_microbatch)):
        micro = micro.to(device)
        with autocast(device, config.dtype):
            outputs = run_scheduled_passes(model, micro.tokens, schedule, step, index * rows_per_microbatch, index, micro.layout)
            loss = multipass_loss(outputs, model.trunk.head_weight, micro.targets, scored, schedule.loss_weight(step), z_loss)
        loss.objective.backward()
        report.objective += float(loss.objective.detach())
        report.executed_positions += sum(output.states.shape[0] * output.states.shape[1] for output in outputs)
        report.add(loss.passes)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    report.gradient_norm = float(torch.nn.utils.get_total_norm(gradients))
    return report


def _plus(a: PassLoss, b: PassLoss) -> PassLoss:
    return PassLoss(a.total + b.total, a.count + b.count, a.fused + b.fused, a.fused_count + b.fused_count, a.plain_there + b.plain_there)


def _mean(total: Tensor, count: Tensor) -> float:
    return float(total) / max(1, int(count))
