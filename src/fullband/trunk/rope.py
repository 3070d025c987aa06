"""Rotary positions: the frequencies of a trunk's shape, stretched by YaRN where its context was extended, and the tables of an angle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fullband.config import TrunkConfig, Yarn


def rotary(positions_BT: Tensor, config: TrunkConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """RoPE's tables [B, 1, T, head_dim], as `rotate` takes them. Angles are computed in at least float32.

    With YaRN the tables are longer than 1 by 1 + 0.1 ln factor: queries and keys both, so scores by its square (arXiv:2309.00071, Eq. 22).
    """
    precise = torch.promote_types(dtype, torch.float32)
    frequencies = inverse_frequencies(config, positions_BT.device, precise)
    angles = positions_BT[:, None, :, None].to(precise) * frequencies
    length = 1 + 0.1 * math.log(config.rope.factor) if config.rope else 1.0
    cos, sin = (angles.cos() * length).to(dtype), (angles.sin() * length).to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def inverse_frequencies(config: TrunkConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Radians per position of each pair of channels, [head_dim / 2]."""
    size = config.head_size
    frequencies = config.rope_base ** (-torch.arange(0, size, 2, device=device, dtype=dtype) / size)
    if config.rope is None:
        return frequencies
    stretched = _stretched(config.rope, size, config.rope_base, device, dtype)
    return frequencies * (1 - stretched + stretched / config.rope.factor)


def _stretched(yarn: Yarn, size: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """How far each pair is interpolated (1) rather than kept (0): a ramp between the pairs that turn `beta_fast` and `beta_slow` times
    within the original context, to whole pairs outward."""

    def pair(turns: float) -> float:
        return size * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair(yarn.beta_fast)), 0)
    last = max(min(math.ceil(pair(yarn.beta_slow)), size - 1), first + 1e-3)
    return ((torch.arange(size // 2, device=device, dtype=dtype) - first) / (last - first)).clamp(0, 1)
