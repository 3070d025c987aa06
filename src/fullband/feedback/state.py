"""The state of decoding: what a forward pass over the next token needs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fullband.feedback.passes import PassState
from fullband.layout import NOWHERE, Layout


@dataclass(frozen=True)
class DecodeState:
    """Caches and states together: whatever pads, forks, reorders or drops sequences of the one does it to the others.

    fed             the cache above the entry, and the states that the next token is fed with
    below           the cache of the layers below the entry; None if there are none
    top_BD          top state of the last position: the head makes the next token's logits of it
    positions_B     position of the next token in each sequence
    documents_B     document of each sequence's tokens in the cache; None = one unpadded document each
    """

    fed: PassState
    below: Any
    top_BD: Tensor
    positions_B: Tensor
    documents_B: Tensor | None = None

    @property
    def cache(self) -> Any:
        """Of the layers above the entry."""
        return self.fed.cache

    def layout(self, tokens: int = 1) -> Layout:
        """Of the next tokens of every sequence. Without padding, positions are the caches' slots."""
        if self.documents_B is None:
            return NOWHERE
        offsets = torch.arange(tokens, device=self.positions_B.device)
        return Layout(self.positions_B[:, None] + offsets, self.documents_B[:, None].expand(-1, tokens))

    def _with_caches(self, change: Callable[[Any], Any]) -> DecodeState:
        lower = None if self.below is None else change(self.below)
        return replace(self, fed=replace(self.fed, cache=change(self.cache)), below=lower)

    def fork(self) -> DecodeState:
        """An independent continuation of every sequence."""
        return self._with_caches(lambda cache: cache.fork())

    def trim(self) -> DecodeState:
        """Without what no later token can see."""
        return self._with_caches(lambda cache: cache.trim())

    def select(self, rows: Tensor) -> DecodeState:
        """The given sequences [N], in that order."""
        documents = None if self.documents_B is None else self.documents_B[rows]
        lower = None if self.below is None else self.below.select(rows)
        return DecodeState(self.fed.select(rows), lower, self.top_BD[rows], self.positions_B[rows], documents)

    def repeat(self, times: int) -> DecodeState:
        """Every sequence `times` times: n samples of one prompt."""
        return self.select(torch.arange(self.top_BD.shape[0], device=self.top_BD.device).repeat_interleave(times))

    @staticmethod
    def join(states: list[DecodeState]) -> DecodeState:
        """The sequences of several states as one batch, padded on the left to one length: what joins a running batch."""
        first, others = states[0], states[1:]
        lower = None if first.below is None else first.below.join([state.below for state in others])
        before = [state.fed.before_BWD for state in states]
        assert all(part is not None for part in before)
        fed = PassState(first.cache.join([state.cache for state in others]), torch.cat([part for part in before if part is not None]))
        positions_B = torch.cat([state.positions_B for state in states])
        documents = [s.positions_B.new_zeros(len(s.positions_B)) if s.documents_B is None else s.documents_B for s in states]
        return DecodeState(fed, lower, torch.cat([state.top_BD for state in states]), positions_B, torch.cat(documents))
