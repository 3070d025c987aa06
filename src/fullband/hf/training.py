"""`forward(labels=…)` in training: Eq. 12 under the config's schedule, so that trainers which know nothing of passes train them.

Trainer, SFTTrainer and torchrun call `forward` and step an optimizer. The step, which the schedule needs (law 7), is counted in `progress`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fullband.config import parse
from fullband.data.batch import IGNORE
from fullband.feedback.loss import multipass_loss, objective_by_token
from fullband.feedback.multipass import PassStates
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.schedule import PassSchedule
from fullband.feedback.scheduled import run_scheduled_passes
from fullband.feedback_config import FeedbackConfig
from fullband.hf.config import FullBandConfig
from fullband.hf.output import FullBandOutput
from fullband.hf.packing import describe_rows, shifted_targets

DEFAULT_SCHEDULE = [{"fraction": 1.0, "passes": {2: 1.0}}]  # where the config says nothing: every step feeds back once


class TrainedModel(FeedbackModel, Protocol):
    """What training needs of `FullBandForCausalLM`."""

    config: FullBandConfig
    progress: Any  # progress.StepCounter

    def get_output_embeddings(self) -> Any: ...


def pass_schedule(model: TrainedModel) -> PassSchedule:
    """The schedule of `config.feedback` over `config.training_steps`. Raises ValueError naming the key for what forward() can't do."""
    settings = {"schedule": DEFAULT_SCHEDULE, **(model.config.feedback or {})}
    if "connection" in settings:
        raise ValueError("config.feedback.connection: the model has its connection already, which config.connection describes")
    feedback = parse(FeedbackConfig, settings, "config.feedback")
    if feedback.fusion_warmup or feedback.adaptive:
        key = "fusion_warmup" if feedback.fusion_warmup else "adaptive"
        raise ValueError(f"config.feedback.{key}: needs `fullband train`; forward(labels=…) neither freezes weights nor measures states")
    steps = model.config.training_steps
    if steps is None and (len(feedback.phases) > 1 or feedback.start_step):
        raise ValueError("config.training_steps: the schedule has several phases, which are fractions of it; set it to the run's steps")
    return PassSchedule(feedback, steps or 1, model.config.training_seed)


def training_forward(
    model: TrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    logits_to_keep: int | Tensor = 0,
) -> FullBandOutput:
    """Loss of this microbatch and the logits and states of pass 1, which have no gradient.

    labels              [B, T], the tokens themselves; -100 where nothing is scored
    num_items_in_batch  scored tokens of the whole step (all microbatches and ranks): the loss is the sum divided by it.
                        None = the mean over this microbatch
    The loss is Eq. 12's objective. Raises ValueError for a config that cannot be followed here (`pass_schedule`) and for LoRA on the head.
    """
    assert labels is not None
    run = run_passes(model, input_ids, attention_mask, position_ids, labels)
    counted = num_items_in_batch if num_items_in_batch is not None else (run.targets_BT != IGNORE).sum()
    scored = torch.as_tensor(counted, device=run.outputs[0].states.device).clamp(min=1)  # a step in which nothing is scored changes nothing
    loss = multipass_loss(run.outputs, model.trunk.head_weight, run.targets_BT, scored, run.loss_weight).objective
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
    with torch.no_grad():
        states_BTD = run.outputs[0].states.detach()
        logits = model.trunk.head(states_BTD[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else kept])
    return FullBandOutput(loss=loss + run.touch, logits=logits, states=states_BTD)


def token_objective(
    model: TrainedModel, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """(each position's share of Eq. 12's objective [B, T], undivided; pass 1's states [B, T, D]). Raises as `training_forward`."""
    run = run_passes(model, input_ids, attention_mask, position_ids, labels)
    objective_BT = objective_by_token(run.outputs, model.trunk.head_weight, run.targets_BT, run.loss_weight)
    return objective_BT + run.touch, run.outputs[0].states


@dataclass(frozen=True)
class PassRun:
    """The passes over one microbatch.

    loss_weight   lambda of Eq. 12
    touch         zero, with the fusion in its graph: a one-pass step would leave the fusion out, and under DistributedDataParallel a
                  parameter that takes part in some steps only gets silently wrong gradients
    """

    outputs: list[PassStates]
    targets_BT: Tensor
    loss_weight: float
    touch: Tensor


def run_passes(
    model: TrainedModel, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, labels: Tensor
) -> PassRun:
    """The passes that the schedule has for this call of `forward`."""
    if hasattr(model.get_output_embeddings(), "lora_A"):
        raise ValueError("the head carries a LoRA adapter, which the chunked loss does not see; leave lm_head out of target_modules")
    schedule = pass_schedule(model)
    step, accumulation = model.progress.next_call(model)
    layout = describe_rows(input_ids, attention_mask, position_ids)
    rank, ranks = _rank()
    first_row = (accumulation * ranks + rank) * input_ids.shape[0]
    outputs = run_scheduled_passes(model, input_ids, schedule, step, first_row, accumulation, layout)
    touch = sum((0.0 * p.sum() for p in model.connection.parameters()), torch.zeros((), device=outputs[0].states.device))
    return PassRun(outputs, shifted_targets(labels, layout.documents_BT), schedule.loss_weight(step), touch)


def _rank() -> tuple[int, int]:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
