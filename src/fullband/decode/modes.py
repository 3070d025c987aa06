"""Modes of decoding (section 4.2): how the prompt is prefilled, and how the next input is made.

| mode     | prompt                                | next input    |
|----------|---------------------------------------|---------------|
| standard | plain                                 | e_t           |
| soft     | plain                                 | e_t ⊗ h_{t-1} |
| fused    | `feedback_passes` ≥ 1 fused passes    | e_t ⊗ h_{t-1} |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fullband.decode.prefill import CacheKeep
from fullband.feedback.by_passes import check_feedback_passes
from fullband.feedback.passes import FeedbackModel, below, sequential
from fullband.feedback.state import DecodeState
from fullband.feedback_config import FeedbackPasses

ModeName = Literal["standard", "soft", "fused"]


@dataclass(frozen=True)
class Mode:
    """`feedback_passes` over the prompt; `feeds_back` says whether a new token's input is fused with the state before it."""

    name: ModeName
    feedback_passes: FeedbackPasses
    feeds_back: bool


def resolve_mode(name: str, feedback_passes: FeedbackPasses | None = None) -> Mode:
    """The named mode; `feedback_passes` (default 1) is a choice only in fused. Raises ValueError for what does not go together."""
    if name not in get_args(ModeName):
        raise ValueError(f"unknown mode '{name}' (known: {', '.join(get_args(ModeName))})")
    if name == "fused":
        passes: FeedbackPasses = 1 if feedback_passes is None else feedback_passes
        check_feedback_passes(passes)
        if passes == 0:
            raise ValueError("fused takes at least 1 feedback pass over the prompt; with 0 it is the mode soft")
        return Mode("fused", passes, feeds_back=True)
    if feedback_passes not in (None, 0):
        raise ValueError(f"{name} takes no feedback passes over the prompt; feedback_passes={feedback_passes!r} needs the mode fused")
    return Mode("soft", 0, feeds_back=True) if name == "soft" else Mode("standard", 0, feeds_back=False)


@torch.no_grad()
def step(model: FeedbackModel, state: DecodeState, tokens_B: Tensor, mode: Mode, keep: CacheKeep = "window") -> DecodeState:
    """The state after one more token [B] of each sequence (Listing 2). The state that was given stays valid.

    The caller keeps sequences within the trunk's context, as `generate` does: looking at `positions_B` here would stall a GPU at every
    token.
    """
    return run_tokens(model, state, tokens_B[:, None], mode.feeds_back, keep)[0]


def run_tokens(
    model: FeedbackModel, state: DecodeState, tokens_BT: Tensor, feeds_back: bool, keep: CacheKeep = "window"
) -> tuple[DecodeState, Tensor]:
    """(The state after T more tokens of each sequence, their top states [B, T, D]), as if each had been generated."""
    inputs, lower = below(model, tokens_BT, state.layout(tokens_BT.shape[1]), state.below, keep)
    fed, output = sequential(model, inputs, state.fed, keep, feeds_back)
    return DecodeState(fed, lower, output.top_BTD[:, -1], state.positions_B + tokens_BT.shape[1], state.documents_B), output.top_BTD
