"""`forward(labels=…)` in training: Eq. 12 under the config's schedule, so that trainers which know nothing of passes train them.

Trainer, SFTTrainer and torchrun call `forward` and step an optimizer. The step, which the schedule needs (law 7), is counted in `progress`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from fullband.config import parse
from fullband.data.batch import IGNORE
from fullband.feedback.loss import multipass_loss, token_losses
from fullband.feedback.multipass import Jitter, PassStates, multipass, multipass_reference
from fullband.feedback.schedule import PassSchedule
from fullband.feedback_config import FeedbackConfig
from fullband.hf.rows import describe_rows, shifted_targets
from fullband.presets import resolve_schedule

if TYPE_CHECKING:
    from fullband.hf.model import FullBandForCausalLM

DEFAULT_SCHEDULE = [{"fraction": 1.0, "passes": {2: 1.0}}]  # where the config says nothing: every step feeds back once


def pass_schedule(model: FullBandForCausalLM) -> tuple[FeedbackConfig, PassSchedule]:
    """The schedule of `config.feedback` over `config.training_steps`. Raises ValueError naming the key for what forward() can't do."""
    settings = {"schedule": DEFAULT_SCHEDULE, **(model.config.feedback or {})}
    feedback = parse(FeedbackConfig, settings, "config.feedback")
    if feedback.fusion_warmup or feedback.adaptive:
        key = "fusion_warmup" if feedback.fusion_warmup else "adaptive"
        raise ValueError(f"config.feedback.{key}: needs `fullband train`; forward(labels=…) neither freezes weights nor measures states")
    phases = resolve_schedule(feedback.schedule)
    steps = model.config.training_steps
    if steps is None and (len(phases) > 1 or feedback.start_step):
        raise ValueError("config.training_steps: the schedule has several phases, which are fractions of it; set it to the run's steps")
    return feedback, PassSchedule(feedback, phases, steps or 1, model.config.training_seed)


def training_forward(
    model: FullBandForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    logits_to_keep: int | Tensor = 0,
) -> CausalLMOutputWithPast:
    """Loss of this microbatch and the logits of pass 1, which have no gradient.

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
        logits = model.trunk.head(run.outputs[0].states[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else kept].detach())
    return CausalLMOutputWithPast(loss=loss + run.touch, logits=logits)


def token_objective(
    model: FullBandForCausalLM, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """(each position's share of Eq. 12's objective [B, T], undivided; pass 1's states [B, T, D]). Raises as `training_forward`."""
    run = run_passes(model, input_ids, attention_mask, position_ids, labels)
    share = run.loss_weight / max(1, len(run.outputs) - 1)
    head = model.trunk.head_weight
    total, slots = torch.zeros_like(run.targets_BT, dtype=torch.promote_types(head.dtype, torch.float32)), torch.arange(labels.shape[1])
    for output in run.outputs:
        targets = run.targets_BT[:, output.start :]
        nll = token_losses(output.states.flatten(0, 1), head, targets.flatten())[0].view(targets.shape)
        if output.k == 1:  # a later pass has pass 1's loss before its own first position
            weight = 1 + share * sum((slots < later.start).to(nll) for later in run.outputs[1:])
            total = total + weight * nll
        else:
            total = total + share * torch.nn.functional.pad(nll, (output.start, 0))
    return total + run.touch, run.outputs[0].states


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
    model: FullBandForCausalLM, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, labels: Tensor
) -> PassRun:
    """The passes that the schedule has for this call of `forward`."""
    if hasattr(model.get_output_embeddings(), "lora_A"):
        raise ValueError("the head carries a LoRA adapter, which the chunked loss does not see; leave lm_head out of target_modules")
    feedback, schedule = pass_schedule(model)
    step, accumulation = model.progress.next_call(model)
    layout = describe_rows(input_ids, attention_mask, position_ids)
    batch, length = input_ids.shape
    passes = schedule.passes(step) if length > 1 else 1
    rank, ranks = _rank()
    rows = (accumulation * ranks + rank) * batch + torch.arange(batch)
    prefixes = schedule.prefixes(step, accumulation, passes, length, rows)
    jitter = Jitter(feedback.jitter, model.config.training_seed, step, rows)
    run = partial(multipass, rounding=feedback.rounding) if feedback.reuse else multipass_reference
    outputs = run(model, input_ids, prefixes, layout, jitter)
    touch = sum((0.0 * p.sum() for p in model.connection.parameters()), torch.zeros((), device=outputs[0].states.device))
    return PassRun(outputs, shifted_targets(labels, layout.documents_BT), schedule.loss_weight(step), touch)


def _rank() -> tuple[int, int]:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
