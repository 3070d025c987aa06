"""The slow twin of decoding: one row, no cache, no padding, no chunks; everything is computed anew for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fullband.model import FullBandModel
from fullband.trunk.attention import dense_plan


def run_decoder(model: Any, inputs_1TD: Tensor) -> Tensor:
    """Top states [1, T, D] of a whole row, from an App. A decoder."""
    plan, model.trunk.plan = model.trunk.plan, dense_plan
    states, _ = model.trunk(inputs_1TD)
    model.trunk.plan = plan
    return states


@torch.no_grad()
def reference_tops(
    model: Any,
    prompt: list[int],
    new: list[int],
    feedback_passes: int | str,
    feeds_back: bool,
    run_row: Callable[[Any, Tensor], Tensor] = run_decoder,
) -> list[Tensor]:
    """Top states [D] after the prompt and after each of the `new` tokens (Eqs. 8-11, Listing 2)."""
    embeddings = model.trunk.embed(torch.tensor([prompt + new]))[0]

    def run(inputs: list[Tensor]) -> Tensor:
        return run_row(model, torch.stack(inputs)[None])[0]

    def fuse(position: int, state: Tensor) -> Tensor:
        return model.fusion(embeddings[position][None, None], state[None, None], model.trunk.input_norm)[0, 0]

    inputs = [embeddings[0]]
    if feedback_passes == "exact":
        for t in range(1, len(prompt)):
            inputs.append(fuse(t, run(inputs)[-1]))
    else:
        inputs = list(embeddings[: len(prompt)])
        for _ in range(int(feedback_passes)):
            states = run(inputs)
            inputs = [embeddings[0]] + [fuse(t, states[t - 1]) for t in range(1, len(prompt))]
    tops = [run(inputs)[-1]]
    for t in range(len(prompt), len(prompt) + len(new)):
        inputs.append(fuse(t, tops[-1]) if feeds_back else embeddings[t])
        tops.append(run(inputs)[-1])
    return tops


@torch.no_grad()
def reference_greedy(model: FullBandModel, prompt: list[int], count: int, feedback_passes: int | str, feeds_back: bool) -> list[int]:
    """The `count` likeliest tokens, one after the other."""
    new: list[int] = []
    for _ in range(count):
        top = reference_tops(model, prompt, new, feedback_passes, feeds_back)[-1]
        new.append(int(model.logits(top).argmax()))
    return new
