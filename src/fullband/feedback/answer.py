"""Reading a prompt and its answer as generation in Soft would have made the answer: the prompt plainly, the answer fused."""

from __future__ import annotations

import torch
from torch import Tensor

from fullband.config import FeedbackPasses
from fullband.feedback.multipass import multipass
from fullband.feedback.passes import FeedbackModel, check_feedback_passes, check_length, fused_pass


def read_answer(
    model: FeedbackModel,
    tokens_BT: Tensor,
    prompt: int,
    feedback_passes: FeedbackPasses = "exact",
    positions_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> Tensor:
    """Top states [B, T, D], differentiable: the first `prompt` slots read plainly, the others with their state fed back.

    feedback_passes   "exact": position by position, equal to generation in Soft; k: in k parallel passes over the answer, which makes its
                      first k positions exact; 0: everything plain, as Standard
    Raises ValueError for a prompt that is empty or leaves no answer, and for "converged", which has no gradient.
    """
    check_length(model, tokens_BT.shape[1])
    check_feedback_passes(feedback_passes)
    if not 0 < prompt < tokens_BT.shape[1]:
        raise ValueError(f"the prompt is 1 … {tokens_BT.shape[1] - 1} of {tokens_BT.shape[1]} slots, not {prompt}")
    if feedback_passes == "converged":
        raise ValueError("an answer is read in a number of feedback passes or 'exact', not 'converged'")
    if feedback_passes != "exact":
        outputs = multipass(model, tokens_BT, [prompt - 1] * feedback_passes, positions_BT, documents_BT)
        return outputs[0].states if feedback_passes == 0 else torch.cat([outputs[0].states[:, :prompt], outputs[-1].states], dim=1)
    embeddings = model.trunk.embed(tokens_BT)

    def part(x_BT: Tensor | None, here: slice) -> Tensor | None:
        return None if x_BT is None else x_BT[:, here]

    first = slice(0, prompt)
    states, cache = model.trunk(embeddings[:, first], part(positions_BT, first), part(documents_BT, first), keep="window")
    read = [states]
    for t in range(prompt, tokens_BT.shape[1]):
        here = slice(t, t + 1)
        token = embeddings[:, here]
        states, cache = fused_pass(
            model, token, token, read[-1][:, -1], part(positions_BT, here), part(documents_BT, here), cache, keep="window"
        )
        read.append(states)
    return torch.cat(read, dim=1)
