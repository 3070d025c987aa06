"""The state of decoding: what a forward pass over the next token needs, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeState:
    """Cache and top state together: whatever pads, forks, reorders or drops rows of the one does it to the other.

    cache           keys and values of every position read so far
    top_BD          state of the last position: its head gives the next token, and in Soft and Fused it is fused with that token
    positions_B     position of the next token in each row
    documents_B     document of each row's tokens in the cache; None = one unpadded document a row
    """

    cache: Any
    top_BD: Tensor
    positions_B: Tensor
    documents_B: Tensor | None = None

    def fork(self) -> DecodeState:
        """An independent continuation of every row."""
        return replace(self, cache=self.cache.fork())

    def select(self, rows: Tensor) -> DecodeState:
        """The given rows [N], in that order."""
        documents = None if self.documents_B is None else self.documents_B[rows]
        return DecodeState(self.cache.select(rows), self.top_BD[rows], self.positions_B[rows], documents)

    def repeat(self, times: int) -> DecodeState:
        """Every row `times` times in a row: n samples of one prompt."""
        return self.select(torch.arange(self.top_BD.shape[0], device=self.top_BD.device).repeat_interleave(times))
