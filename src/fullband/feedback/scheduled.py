"""The passes of one microbatch as the schedule has them: for `fullband train` and for transformers' `forward(labels=…)`."""

from __future__ import annotations

import torch
from torch import Tensor

from fullband.feedback.multipass import Jitter, PassStates, multipass, multipass_reference
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.schedule import PassSchedule
from fullband.layout import NOWHERE, Layout


def run_scheduled_passes(
    model: FeedbackModel,
    tokens_BT: Tensor,
    schedule: PassSchedule,
    step: int,
    first_row: int = 0,
    microbatch: int = 0,
    layout: Layout = NOWHERE,
) -> list[PassStates]:
    """Passes 1 … K over tokens [B, T]: the number of passes, the prefixes and the jitter that `schedule` draws for this step.

    step         counted from 0
    first_row    the number of the first sequence in the step's whole batch, over all microbatches and ranks
    microbatch   the number of this microbatch in the step
    layout       `plain_BT` is True at the prompts: what the prefix "answer" leaves without feedback

    Sequences of one token are run once: there is nothing to feed back. Raises ValueError as `PassSchedule.prefixes` and `multipass`.
    """
    feedback = schedule.config
    batch, length = tokens_BT.shape
    passes = schedule.passes(step) if length > 1 else 1
    rows = torch.arange(first_row, first_row + batch)
    prefixes = schedule.prefixes(step, microbatch, passes, length, rows, layout.plain_BT)
    jitter = Jitter(feedback.jitter, schedule.seed, step, rows)
    layout = layout.with_plain(None)
    if not feedback.reuse:
        return multipass_reference(model, tokens_BT, prefixes, layout, jitter)
    return multipass(model, tokens_BT, prefixes, layout, jitter, rounding=feedback.rounding)
