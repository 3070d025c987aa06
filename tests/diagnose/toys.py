"""Models whose dynamics are known: the state is (10 x one-hot token, z), z_t = start + gain * z_{t-1}; the head reads the token.

The loss is then near 0 whatever z does, and all that passes change is z: in pass k it is start * (1 + gain + … + gain^(k-1)) past the
wavefront, so the change is start * gain^(k-1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.data.batch import Batch
from reference.toy import ToyModel

VOCAB = 4


@dataclass(frozen=True)
class Positions:
    """The cache of a trunk without attention: how many positions it has read."""

    length: int

    def fork(self) -> Positions:
        return self

    def select(self, rows: Tensor) -> Positions:
        return self


class Toy(ToyModel):
    """A trunk and a fusion in one. `constant` scales the one-hot part; `turn`, a 2x2 matrix, replaces the gain by a map of the plane."""

    context, vocab_size = 4096, VOCAB

    def __init__(self, gain: float = 0.0, start: float = 1.0, constant: float = 10.0, turn: Tensor | None = None):
        self.map = torch.eye(2, dtype=torch.float64) * gain if turn is None else turn.double()
        self.start, self.constant = start, constant
        self.connect_itself()

    @property
    def head_weight(self) -> Tensor:
        return F.one_hot(torch.arange(VOCAB), VOCAB + 2)[:, : VOCAB + 2].double()

    def embed(self, tokens_BT: Tensor) -> Tensor:
        token = self.constant * F.one_hot(tokens_BT, VOCAB).double()
        z = torch.tensor([self.start, 0.0], dtype=torch.float64).expand(*tokens_BT.shape, 2)
        return torch.cat([token, z], dim=-1)

    def input_norm(self, inputs: Tensor) -> Tensor:
        return inputs

    def fusion(self, embedding: Tensor, carried: Tensor, input_norm: Any) -> Tensor:
        return torch.cat([embedding[..., :VOCAB], embedding[..., VOCAB:] + carried[..., VOCAB:] @ self.map.T], dim=-1)

    def __call__(self, inputs: Tensor, positions: Any = None, documents: Any = None, cache: Any = None, keep: str = "none") -> Any:
        read = (cache.length if cache else 0) + inputs.shape[1]
        return inputs, None if keep == "none" else Positions(read)


class HalfToy(Toy):
    """In float16; the fusion is computed in float64."""

    @property
    def head_weight(self) -> Tensor:
        return super().head_weight.half()

    def embed(self, tokens_BT: Tensor) -> Tensor:
        return super().embed(tokens_BT).half()

    def fusion(self, embedding: Tensor, carried: Tensor, input_norm: Any) -> Tensor:
        return super().fusion(embedding.double(), carried.double(), input_norm).half()


def rows(length: int = 64, count: int = 3, seed: int = 0) -> Batch:
    """Random tokens that are their own targets."""
    tokens = torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).expand(count, length).contiguous()
    return Batch(tokens, tokens.clone(), positions, torch.zeros_like(tokens))
