"""The slow twin of sliding: everything is read anew for every token, and a text that is too long starts again with its last half."""

from __future__ import annotations

import torch

from fullband.model import FullBandModel
from reference.decoding import reference_tops


@torch.no_grad()
def reference_sliding_greedy(
    model: FullBandModel, prompt: list[int], count: int, feedback_passes: int | str, feeds_back: bool
) -> list[int]:
    """The `count` likeliest tokens, one after the other."""
    context = model.trunk.context
    read_as_prompt, new, made = list(prompt), [], []
    if len(prompt) > context:
        read_as_prompt = prompt[-(context // 2) :]
    for _ in range(count):
        if len(read_as_prompt) + len(new) > context:
            read_as_prompt, new = (read_as_prompt + new)[-(context // 2) :], []
        top = reference_tops(model, read_as_prompt, new, feedback_passes, feeds_back)[-1]
        new.append(int(model.logits(top).argmax()))
        made.append(new[-1])
    return made
