"""Mergers: what enters the stack, made of the residual stream there and the carried state. The paper's fusion (Eq. 4), its ablations, and
recirculation. Only the active one exists, so only it has parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fullband.trunk.pointwise import lengths

Norm = Callable[[Tensor], Tensor]


class Merger(nn.Module):
    """Base of all: `combine(x, h)` is the raw mixture, `forward` brings it to the scale of plain inputs.

    `half_open` (an ablation): the token's gate is one half everywhere.
    """

    half_open = False

    def combine(self, x: Tensor, carried: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, carried: Tensor, input_norm: Norm | None) -> Tensor:
        """What enters, [B, T, D], from the residual stream x and the carried state, both [B, T, D]. `input_norm` is the trunk's at the
        input of the stack; None inside it, where the scale of plain inputs is that of x itself, position by position."""
        merged = self.combine(x, carried)
        return at_scale_of(x, merged) if input_norm is None else input_norm(merged)


class Gated(Merger):
    """W_U h ⊙ σ(W_G e), Eq. 4: the state is the value, the token only its gate, so using the state is mandatory."""

    def __init__(self, width: int):
        super().__init__()
        self.state = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)

    def combine(self, x: Tensor, carried: Tensor) -> Tensor:
        opened = torch.sigmoid(self.gate(x))
        return self.state(carried) * (torch.full_like(opened, 0.5) if self.half_open else opened)


class Concat(Merger):
    """W [e; h]."""

    def __init__(self, width: int):
        super().__init__()
        self.both = nn.Linear(2 * width, width, bias=False)

    def combine(self, x: Tensor, carried: Tensor) -> Tensor:
        return self.both(torch.cat([x, carried], dim=-1))


class Add(Merger):
    """e + W h: the symmetric fusion that section 3.1 argues against (it can learn to ignore the state)."""

    def __init__(self, width: int):
        super().__init__()
        self.state = nn.Linear(width, width, bias=False)

    def combine(self, x: Tensor, carried: Tensor) -> Tensor:
        return x + self.state(carried)


class Residual(Gated):
    """e + W_U h ⊙ σ(W_G e) with W_U started at zero, at the scale of e: a converted model starts exactly where its source is."""

    def combine(self, x: Tensor, carried: Tensor) -> Tensor:
        return x + super().combine(x, carried)

    def forward(self, x: Tensor, carried: Tensor, input_norm: Norm | None) -> Tensor:
        return at_scale_of(x, self.combine(x, carried))


class Recirculation(Merger):
    """α h ‖x‖ / ‖h‖ + (1 - α) x: a mixture at equal norms, without parameters (arXiv 2608.17981, fed from the previous token here)."""

    def __init__(self, width: int, share: float = 0.1):
        super().__init__()
        self.share = share

    def combine(self, x: Tensor, carried: Tensor) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        wide_x, wide_h = x.to(precise), carried.to(precise)
        norms = lengths(wide_x) / lengths(wide_h).clamp(min=1e-12)
        return (self.share * norms[..., None] * wide_h + (1 - self.share) * wide_x).to(x.dtype)

    def forward(self, x: Tensor, carried: Tensor, input_norm: Norm | None) -> Tensor:
        return self.combine(x, carried)


def at_scale_of(x: Tensor, merged: Tensor) -> Tensor:
    """`merged` with the root mean square of x, position by position: where the two are equal, it is x itself.

    In at least float32: in float16 squares overflow from 256 on, and vanish below 0.0002."""
    precise = torch.promote_types(merged.dtype, torch.float32)

    def mean_square(y: Tensor) -> Tensor:
        return y.to(precise).square().mean(-1, keepdim=True) + 1e-12

    return (merged.to(precise) * torch.sqrt(mean_square(x) / mean_square(merged))).to(merged.dtype)


MERGERS: dict[str, type[Merger]] = {"gated": Gated, "concat": Concat, "add": Add, "residual": Residual, "recirculation": Recirculation}


def build_merger(name: str, width: int) -> Merger:
    """The named merger, initialised: matrices N(0, 1/fan_in), the residual one's W_U zero. Raises ValueError."""
    if name not in MERGERS:
        raise ValueError(f"unknown fusion '{name}' (known: {', '.join(MERGERS)})")
    merger = MERGERS[name](width)
    for module in merger.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    if isinstance(merger, Residual):
        nn.init.zeros_(merger.state.weight)
    return merger
