"""The shape of the model that decoding is tested on, and prompts for it."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW, CONTEXT, VOCABULARY = 6, 48, 29


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(prompts: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """(tokens [B, T], mask [B, T]); padding holds a real id, which nothing may read."""
    longest = max(map(len, prompts))
    tokens, mask = torch.full((len(prompts), longest), 7), torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        here = slice(longest - len(prompt), longest) if side == "left" else slice(0, len(prompt))
        tokens[row, here], mask[row, here] = torch.tensor(prompt), True
    return tokens, mask
