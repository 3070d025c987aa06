"""One optimizer step: microbatches through the passes, Eq. 12, and what is worth knowing about it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from fullband.config import TrainConfig
from fullband.data.batch import Batch
from fullband.device import autocast
from fullband.feedback.loss import PassLoss, multipass_loss
from fullband.feedback.schedule import PassSchedule
from fullband.feedback.scheduled import run_scheduled_passes
from fullband.loading import LoadedModel
from fullband.optim.sharded import gradient_norm
from fullband.training.parallel import ALONE, Parallel


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

    def over_ranks(self, parallel: Parallel) -> None:
        """Add up what the ranks found, each of its rows."""
        if parallel.world == 1:
            return
        sums = [tensor for loss in self.sums for tensor in astuple(loss)]
        summed = parallel.sum([self.objective, self.executed_positions, *map(float, sums)])
        self.objective, self.executed_positions = summed[0], int(summed[1])
        self.sums = [PassLoss(*map(torch.tensor, summed[at : at + 5])) for at in range(2, len(summed), 5)]

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
    parallel: Parallel = ALONE,
) -> StepReport:
    """Forward and backward over the microbatches of `batch`; gradients are added to the parameters'.

    batch     of the whole step: of each microbatch, a rank takes its part of the rows
    Every sum is divided once, by the step's number of scored targets, so the split into microbatches does not matter (law 9).
    """
    device = model.trunk.device
    rows_per_microbatch = config.microbatch_rows or batch.tokens.shape[0]
    scored = max(1, batch.counted)
    report = StepReport(schedule.passes(step), tokens=batch.tokens.numel())
    for index, micro in enumerate(batch.split(rows_per_microbatch)):
        share = micro.tokens.shape[0] // parallel.world
        first = parallel.rank * share
        first_row = index * rows_per_microbatch + first
        micro = micro.rows(first, first + share).to(device)
        forward = parallel.gathered(microbatch_loss)
        objective, passes, positions = forward(model, micro, step, schedule, config, z_loss, scored, index, first_row)
        objective.backward()
        report.objective += float(objective.detach())
        report.executed_positions += positions
        report.add(passes)
    report.over_ranks(parallel)
    report.gradient_norm = float(gradient_norm(model.parameters()))
    return report


def microbatch_loss(
    model: LoadedModel,
    micro: Batch,
    step: int,
    schedule: PassSchedule,
    config: TrainConfig,
    z_loss: float,
    scored: int,
    index: int,
    first_row: int,
) -> tuple[Tensor, list[PassLoss], int]:
    """(the objective to differentiate, each pass's sums, positions computed) of the step's microbatch number `index`."""
    with autocast(model.trunk.device, config.dtype):
        outputs = run_scheduled_passes(model, micro.tokens, schedule, step, first_row, index, micro.layout)
        loss = multipass_loss(outputs, model.trunk.head_weight, micro.targets, scored, schedule.loss_weight(step), z_loss)
    return loss.objective, loss.passes, sum(output.states.shape[0] * output.states.shape[1] for output in outputs)


def _plus(a: PassLoss, b: PassLoss) -> PassLoss:
    return PassLoss(a.total + b.total, a.count + b.count, a.fused + b.fused, a.fused_count + b.fused_count, a.plain_there + b.plain_there)


def _mean(total: Tensor, count: Tensor) -> float:
    return float(total) / max(1, int(count))
