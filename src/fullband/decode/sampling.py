"""Logits to tokens. A row's random numbers are a function of (seed, row, step): neighbours and batch size do not matter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_STREAM = 0x73616D70  # keeps these streams apart from those of training with the same seed


class Sampler:
    """Chooses the next token of every row: the likeliest at temperature 0, else a draw from softmax(logits / temperature)."""

    def __init__(self, temperature: float, seed: int, rows: Sequence[int], steps: int, device: torch.device | str = "cpu"):
        """`rows` are the rows' numbers, which key their random streams; `steps` the most tokens a row may draw.

        Raises ValueError for a temperature that is negative or not finite, and for a negative seed.
        """
        if not math.isfinite(temperature) or temperature < 0:
            raise ValueError(f"temperature is a number ≥ 0, not {temperature}")
        if seed < 0:
            raise ValueError(f"a seed is an integer ≥ 0, not {seed}")
        self.temperature = temperature
        # Drawn ahead: a step is then one gather, whatever the batch
        self.uniforms_BS = row_uniforms(seed, rows, steps).to(device) if temperature > 0 else None

    def __call__(self, logits_NV: Tensor, rows_N: Tensor, step: int) -> Tensor:
        """Tokens [N] of the rows with these indices (into the constructor's `rows`) at this step (counted from 0)."""
        if self.uniforms_BS is None:
            return logits_NV.argmax(dim=-1)
        return draw(_precise(logits_NV) / self.temperature, self.uniforms_BS[rows_N, step])


def row_uniforms(seed: int, rows: Sequence[int], steps: int) -> Tensor:
    """Uniform [0, 1) numbers [rows, steps] in float64, one generator a row; a row's first n do not depend on `steps`."""
    return torch.from_numpy(np.stack([np.random.default_rng([_STREAM, seed, row]).random(steps) for row in rows]))


def draw(scores_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Tokens [N] with probabilities softmax(scores), by inversion of the distribution function; a score of -inf is never drawn."""
    cumulative_NV = torch.softmax(scores_NV, dim=-1).cumsum(dim=-1)
    total_N1 = cumulative_NV[:, -1:]  # 1 but for rounding
    below_N1 = torch.minimum(uniforms_N[:, None].to(scores_NV.dtype) * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    return torch.searchsorted(cumulative_NV, below_N1, right=True)[:, 0]  # the first token whose cumulative probability is above it


def _precise(logits: Tensor) -> Tensor:
    """float64 where the device has it: a cumulative sum over 100,000 tokens loses rare ones in float32."""
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)
