"""Randomness that is a pure function of its keys: the same on every device, rank and microbatch split, and after a resume (law 7)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_WORDS = {"passes": 1, "prefix": 2, "jitter": 3}
_LOW31 = 0x7FFFFFFF


def keyed_generator(purpose: str, *key: int) -> np.random.Generator:
    """A numpy generator for one decision, keyed by what it is for and by integers such as (seed, step, pass)."""
    return np.random.default_rng([_WORDS[purpose], *key])


def keyed_uniform(key: tuple[int, ...], rows_B: Tensor, positions_T: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Uniform[-1, 1] noise [B, T, width]; the value at (row, position, channel) depends on these three and the key alone.

    An integer hash, not a generator's stream: any part of it can be computed alone, on any device.
    """
    salt = int(keyed_generator("jitter", *key).integers(1, _LOW31))
    channels = torch.arange(width, device=rows_B.device)
    x = _mix(rows_B.to(torch.int64) + salt)
    x = _mix(x[:, None] + positions_T.to(torch.int64)[None])
    x = _mix(x[..., None] + channels)
    return (x.to(torch.float32) / 2**30 - 1).to(dtype)


def _mix(x: Tensor) -> Tensor:
    """A 31-bit integer hash (multiply, xor-shift, twice); int64 holds every product without overflow."""
    x = x & _LOW31
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & _LOW31
    x = ((x ^ (x >> 12)) * 0x297A2D39) & _LOW31
    return x ^ (x >> 15)
