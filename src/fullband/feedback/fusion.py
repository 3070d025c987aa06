"""Fusions e ⊗ h (Eq. 4) and their ablations. Only the active one exists, so only it has parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fullband.config import Control


class Fusion(nn.Module):
    """Base of all: `combine(e, h)` is the raw fusion, `forward` applies the control and brings the result to the scale of plain inputs.

    `control` (ablations): zeroed = the carried state is 0; shuffled = it comes from the next row of the batch;
    constant-gate = the token's gate is one half everywhere.
    """

    control: Control = "none"

    def combine(self, embedding: Tensor, carried: Tensor) -> Tensor:
        raise NotImplementedError

    def normalise(self, fused: Tensor, embedding: Tensor, input_norm: Callable[[Tensor], Tensor]) -> Tensor:
        return input_norm(fused)

    def forward(self, embedding: Tensor, carried: Tensor, input_norm: Callable[[Tensor], Tensor]) -> Tensor:
        """The stack's input [B, T, D] from e_t and h_{t-1}, both [B, T, D]."""
        if self.control == "zeroed":
            carried = torch.zeros_like(carried)
        elif self.control == "shuffled":
            if carried.shape[0] < 2:
                raise ValueError("the control 'shuffled' takes the carried state from another row: it needs at least two rows")
            carried = carried.roll(1, dims=0)
        return self.normalise(self.combine(embedding, carried), embedding, input_norm)

    def gated(self, embedding: Tensor, gate: nn.Linear) -> Tensor:
        opened = torch.sigmoid(gate(embedding))
        return torch.full_like(opened, 0.5) if self.control == "constant-gate" else opened


class Gated(Fusion):
    """W_U h ⊙ σ(W_G e), Eq. 4: the state is the value, the token only its gate, so reading the state is mandatory."""

    def __init__(self, width: int):
        super().__init__()
        self.state = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)

    def combine(self, embedding: Tensor, carried: Tensor) -> Tensor:
        return self.state(carried) * self.gated(embedding, self.gate)


class Concat(Fusion):
    """W [e; h]."""

    def __init__(self, width: int):
        super().__init__()
        self.both = nn.Linear(2 * width, width, bias=False)

    def combine(self, embedding: Tensor, carried: Tensor) -> Tensor:
        return self.both(torch.cat([embedding, carried], dim=-1))


class Add(Fusion):
    """e + W h: the symmetric fusion that section 3.1 argues against (it can learn to ignore the state)."""

    def __init__(self, width: int):
        super().__init__()
        self.state = nn.Linear(width, width, bias=False)

    def combine(self, embedding: Tensor, carried: Tensor) -> Tensor:
        return embedding + self.state(carried)


class Residual(Gated):
    """e + W_U h ⊙ σ(W_G e) with W_U started at zero: a converted model starts exactly where its source is, with no shock."""

    def combine(self, embedding: Tensor, carried: Tensor) -> Tensor:
        return embedding + super().combine(embedding, carried)

    def normalise(self, fused: Tensor, embedding: Tensor, input_norm: Callable[[Tensor], Tensor]) -> Tensor:
        """To the embedding's own root mean square, position by position: while W_U is zero, the fused input is e itself.

        In at least float32: in float16 squares overflow from 256 on, and vanish below 0.0002."""
        precise = torch.promote_types(fused.dtype, torch.float32)

        def mean_square(x: Tensor) -> Tensor:
            return x.to(precise).square().mean(-1, keepdim=True) + 1e-12

        return (fused.to(precise) * torch.sqrt(mean_square(embedding) / mean_square(fused))).to(fused.dtype)


FUSIONS: dict[str, type[Fusion]] = {"gated": Gated, "concat": Concat, "add": Add, "residual": Residual}


def build_fusion(name: str, width: int) -> Fusion:
    """The named fusion, initialised: matrices N(0, 1/fan_in), the residual entry's W_U zero. Raises ValueError."""
    if name not in FUSIONS:
        raise ValueError(f"unknown fusion '{name}' (known: {', '.join(FUSIONS)})")
    fusion = FUSIONS[name](width)
    for module in fusion.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    if isinstance(fusion, Residual):
        nn.init.zeros_(fusion.state.weight)
    return fusion
