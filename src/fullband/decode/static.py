"""The decoding step with fixed buffers: no shape, no address and no Python changes from one token to the next.

`modes.step` makes a new state at every token, with a cache that grows. Here the same step works on buffers that stay where they are,
and looks at no value on the host. So it can be compiled once (torch.compile removes the many small kernels that a single token is made
of) or recorded as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fullband.decode.modes import Mode, step
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.state import DecodeState
from fullband.trunk.cache import Cache
from fullband.trunk.static_cache import StaticCache


class StaticStepper:
    """Decodes the rows of a prefilled state, which stays valid.

    state   where they stand: overwritten by every step, always the same tensors
    room    tokens that can still be read
    """

    def __init__(self, model: FeedbackModel, state: DecodeState, capacity: int, mode: Mode, compile: bool = False):
        """Buffers for `capacity` slots, those that `state` has read (its longest row's tokens) included.

        compile   compile the step at its first use, which takes seconds to minutes and needs a C++ compiler on the CPU. The next stepper
                  on the same model with the same rows and capacity reuses nothing; `load` does
        Raises ValueError for a capacity that leaves no room or exceeds the trunk's context, and for a cache of another trunk's kind.
        """
        if not isinstance(state.cache, Cache):
            raise ValueError(f"fixed buffers are for the built-in decoder, whose cache is a Cache, not {type(state.cache).__name__}")
        if not state.cache.length < capacity <= model.trunk.context:
            limits = f"more than the {state.cache.length} slots read so far and at most the context, {model.trunk.context}"
            raise ValueError(f"the capacity of fixed buffers is {limits}; not {capacity}")
        documents_B = None if state.documents_B is None else state.documents_B.clone()
        self._model, self._mode, self._capacity = model, mode, capacity
        self.state = DecodeState(StaticCache(state.cache, capacity), state.top_BD.clone(), state.positions_B.clone(), documents_B)
        self.room = capacity - state.cache.length
        self._run: Callable[[Tensor], None] = torch.compile(self._advance, fullgraph=True, dynamic=False) if compile else self._advance

    def load(self, state: DecodeState) -> None:
        """Go on from another state with as many rows, padded likewise or not at all. Raises ValueError if it does not fit."""
        if state.documents_B is not None and self.state.documents_B is None:
            raise ValueError("a stepper that was made for rows of one length cannot take padded ones")
        self.state.cache.load(state.cache)
        self.state.top_BD.copy_(state.top_BD)
        self.state.positions_B.copy_(state.positions_B)
        self.room = self._capacity - state.cache.length

    def __call__(self, tokens_B: Tensor) -> Tensor:
        """Each row reads one more token [B]; returns the top states [B, D], which the next call overwrites.

        Raises ValueError when the capacity is used up.
        """
        if self.room < 1:
            raise ValueError(f"the {self._capacity} slots of the fixed buffers are used up")
        self._run(tokens_B)
        self.room -= 1
        return self.state.top_BD

    @torch.no_grad()
    def _advance(self, tokens_B: Tensor) -> None:
        after = step(self._model, self.state, tokens_B, self._mode)
        self.state.top_BD.copy_(after.top_BD)
        self.state.positions_B.copy_(after.positions_B)
