"""RMSNorm and rotary positions with hand-written gradients for the CPU, and in as few kernels as can be: decoding is made of small ones.

PyTorch has no fused kernel for either there: autograd's own way is a dozen passes over memory per norm. Everywhere else (GPU, low
precision, torch.compile, which fuse by themselves) the plain formula runs. `*_reference` are those formulas; `python -m benchmarks.train`
shows what this buys.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · (weight · scale) over the last dimension. A branch's depth scaling is `scale`: one pass over the branch less."""

    eps: float

    def __init__(self, size: int, eps: float, scale: float = 1.0):
        super().__init__(size, eps=eps)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.scale == 1.0 else self.weight * self.scale
        if not _hand_written(x) or x.dtype != weight.dtype:
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        if not torch.is_grad_enabled():
            return (x * _inverse_rms(x, self.eps)).mul_(weight)
        return _RMSNorm.apply(x, weight, self.eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_scalar(eps, x.dtype), length, length, value=1 / x.shape[-1]).rsqrt_()


@cache
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse_rms = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.eps = eps
        return (x * inverse_rms).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        x, weight, inverse_rms = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the result must itself be differentiable
            return *_rms_norm_gradients(x, weight, ctx.eps, gradient), None
        # LayerNorm's kernel with the mean held at 0 is RMSNorm's gradient, but for the term it takes away for its own mean.
        size = x.shape[-1]
        zero = torch.zeros_like(inverse_rms)
        to_x, to_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient.contiguous(), x, [size], zero, inverse_rms, weight, None, [True, True, False]
        )
        return to_x.addcmul_(inverse_rms, (gradient @ weight)[..., None], value=1 / size), to_weight, None


def _rms_norm_gradients(x: Tensor, weight: Tensor, eps: float, gradient: Tensor) -> tuple[Tensor, Tensor]:
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed, weighted = x * inverse_rms, gradient * weight
    to_x = inverse_rms * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return to_x, (gradient * normed).reshape(-1, x.shape[-1]).sum(0)


def lengths(x: Tensor) -> Tensor:
    """Euclidean norms over the last dimension, in at least float32: float16 overflows at 65,504, bfloat16 has two digits."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


def rotate(x_BHTd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the two halves (a, b) of every head by the position's angles: (a cos - b sin, b cos + a sin).

    `cos`, `sin` [B, 1, T, d] hold the angles twice, once for each half, and sin its sign: (-sin, sin).
    """
    if not _hand_written(x_BHTd):
        return rotate_reference(x_BHTd, cos, sin)
    if not torch.is_grad_enabled():
        return (x_BHTd * cos).addcmul_(x_BHTd.roll(x_BHTd.shape[-1] // 2, dims=-1), sin)
    return _Rotation.apply(x_BHTd, cos, sin)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([b, a], dim=-1) * sin


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        turned = x * cos
        for half, other, sine in zip(turned.chunk(2, dim=-1), reversed(x.chunk(2, dim=-1)), sin.chunk(2, dim=-1), strict=True):
            half.addcmul_(other, sine)  # by halves: over many positions a rolled copy of x would cost a pass over memory
        return turned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(gradients[0], cos, -sin), None, None  # the inverse turn


def _hand_written(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()
