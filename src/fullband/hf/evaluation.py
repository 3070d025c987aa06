"""`forward` in evaluation: whole texts, with the config's feedback passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullband.decode.modes import resolve_mode
from fullband.decode.prompts import PADDING, align_prompts
from fullband.feedback.by_passes import top_states
from fullband.feedback.converged import run_converged
from fullband.feedback.passes import FeedbackModel, below
from fullband.feedback_config import FeedbackPasses
from fullband.hf.packing import describe_rows


def run_text(
    model: FeedbackModel,
    tokens_BT: Tensor,
    feedback_passes: FeedbackPasses,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Top states [B, T, D]; arbitrary in padding. Arguments are those of `describe_rows` and `top_states`, and so are errors;
    ValueError too for "converged" where a row holds several documents."""
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask has {attention_mask.dim()} dimensions; with latent feedback a 2-D mask says what is padding")
    layout = describe_rows(tokens_BT, attention_mask, position_ids)
    documents_BT = layout.documents_BT
    if feedback_passes != "converged" or documents_BT is None:
        return top_states(model, tokens_BT, feedback_passes, layout)
    if bool((documents_BT > 0).any()):
        raise ValueError("feedback_passes 'converged' takes one document a sequence; packed rows take 0, 1, 2, … or 'exact'")
    held_BT = documents_BT != PADDING
    rows = align_prompts(model.trunk, tokens_BT, held_BT).padded_right()
    states_BTD = run_converged(model, below(model, rows.tokens_BT, rows.layout)[0], rows.lengths_B).top_BTD
    slots_BT = (held_BT.long().cumsum(dim=1) - 1).clamp(min=0)
    return states_BTD.gather(1, slots_BT[..., None].expand(-1, -1, states_BTD.shape[-1]))


def run_as_generated(
    model: Any, tokens_BT: Tensor, logits_to_keep: int | Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Tensor:
    """Top states [B, T, D] of prompts and the answers that `generate` made of them: what a policy's log-probabilities are of.

    The last `logits_to_keep` - 1 tokens are the answer. It is run position by position, or in `config.feedback_passes` passes if the
    config says so. Raises ValueError where nothing says which part is the answer, and for fused prompts in parallel passes.
    """
    config = model.config
    mode = resolve_mode(*model.decoding_mode())
    passes: FeedbackPasses = config.feedback_passes or "exact"
    if not mode.feeds_back:
        return run_text(model, tokens_BT, 0, attention_mask, position_ids)
    if mode.name == "fused" and mode.feedback_passes != "exact":
        raise ValueError("config.score_as_generated: a text of the mode fused is scored only with generation's feedback_passes='exact'")
    if mode.name == "fused":
        return run_text(model, tokens_BT, "exact", attention_mask, position_ids)
    if isinstance(logits_to_keep, Tensor) or not logits_to_keep:
        raise ValueError(
            "config.score_as_generated: logits_to_keep has to say how many of the last tokens are the answer (their number + 1)"
        )
    layout = describe_rows(tokens_BT, attention_mask, position_ids)
    prompt, slots_T = tokens_BT.shape[1] - logits_to_keep + 1, torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    if not 0 < prompt < len(slots_T):
        raise ValueError(f"the prompt is 1 … {len(slots_T) - 1} of {len(slots_T)} slots, not {prompt}")
    return top_states(model, tokens_BT, passes, layout.with_plain((slots_T < prompt).expand_as(tokens_BT)))
