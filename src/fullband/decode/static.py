"""The decoding step with fixed buffers: no shape, no address and no Python changes from one token to the next.

`modes.step` makes a new state at every token, with a cache that grows. Here the same step works on buffers that stay where they are,
and looks at no value on the host. So it can be compiled once (torch.compile removes the many small kernels that a single token is made
of) or recorded as a CUDA graph. `StaticBatch` generates with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fullband.decode.modes import Mode, step
from fullband.decode.sampling import History
from fullband.feedback.passes import FeedbackModel, PassState
from fullband.feedback.state import DecodeState
from fullband.trunk.cache import Cache
from fullband.trunk.static_cache import StaticCache

RECOMPILE_LIMIT = 64  # shapes of the step compiled in one process; torch's own limit, 8, ends with an error


class StaticStepper:
    """Decodes the rows of a prefilled state, which stays valid.

    state   where they stand: overwritten by every step, always the same tensors
    room    tokens that can still be run
    """

    def __init__(self, model: FeedbackModel, state: DecodeState, capacity: int, mode: Mode, compile: bool = False, room: int | None = None):
        """Buffers for rows of up to `capacity` tokens, those that `state` was made of included.

        compile   compile the step at its first use, which takes seconds to minutes and needs a C++ compiler on the CPU. Later steppers with
                  as many rows and the same capacity use the same code
        room      tokens that will be run; None = as many as fit the longest row. More are right where rows that outgrow the capacity no
                  longer count: such a row forgets its oldest tokens
        Raises ValueError for a capacity that leaves no room or exceeds the trunk's context, and for a cache of another trunk's kind.
        """
        if not isinstance(state.cache, Cache):
            raise ValueError(f"fixed buffers are for the built-in decoder, whose cache is a Cache, not {type(state.cache).__name__}")
        if not state.cache.length < capacity <= model.trunk.context:
            limits = f"more than the {state.cache.length} slots used so far and at most the context, {model.trunk.context}"
            raise ValueError(f"the capacity of fixed buffers is {limits}; not {capacity}")
        documents_B = None if state.documents_B is None else state.documents_B.clone()
        self._model, self._mode, self._capacity = model, mode, capacity
        lower = None if state.below is None else StaticCache(state.below, capacity)
        assert state.fed.before_BWD is not None
        fed = PassState(StaticCache(state.cache, capacity), state.fed.before_BWD.clone())
        self.state = DecodeState(fed, lower, state.top_BD.clone(), state.positions_B.clone(), documents_B)
        self.room = capacity - state.cache.length if room is None else room
        self._run: Callable[[Tensor], None] = _compiled(self._advance) if compile else self._advance

    def load(self, state: DecodeState) -> None:
        """Go on from another state with as many rows, padded likewise or not at all. Raises ValueError if it does not fit."""
        if state.documents_B is not None and self.state.documents_B is None:
            raise ValueError("a stepper that was made for rows of one length cannot take padded ones")
        self.state.cache.load(state.cache)
        if self.state.below is not None:
            self.state.below.load(state.below)
        self._take(state)
        self.room = self._capacity - state.cache.length

    def __call__(self, tokens_B: Tensor) -> Tensor:
        """Runs one more token [B] of each row; returns the top states [B, D], which the next call overwrites.

        Raises ValueError when there is no room left.
        """
        if self.room < 1:
            raise ValueError(f"the {self._capacity} slots of the fixed buffers are used up")
        self._run(tokens_B)
        self.room -= 1
        return self.state.top_BD

    @torch.no_grad()
    def _advance(self, tokens_B: Tensor) -> None:
        self._take(step(self._model, self.state, tokens_B, self._mode))

    def _take(self, state: DecodeState) -> None:
        assert self.state.fed.before_BWD is not None and state.fed.before_BWD is not None
        self.state.fed.before_BWD.copy_(state.fed.before_BWD)
        self.state.top_BD.copy_(state.top_BD)
        self.state.positions_B.copy_(state.positions_B)


class StaticBatch:
    """`RunningBatch` in fixed buffers: a row that leaves stays in the batch, ignored, until all have left."""

    def __init__(self, model: FeedbackModel, mode: Mode, state: DecodeState, limits: Sequence[int], compile: bool):
        """`limits` are the most tokens that each row makes. To be compiled, rows and capacity are rounded up to powers of two and all
        rows count as padded, so that few shapes are. Raises ValueError for a cache of another trunk's kind."""
        longest = max(length + limit for length, limit in zip(state.positions_B.tolist(), limits, strict=True))
        self._rows_N = torch.arange(len(limits), device=state.top_BD.device)
        if compile:
            longest = min(_power_of_two(longest), model.trunk.context)
            state = _filled_up(state, _power_of_two(len(limits)))
        self._stepper = StaticStepper(model, state, longest, mode, compile, room=max(limits))
        self._tokens_B = torch.zeros_like(state.positions_B)

    @property
    def top_ND(self) -> Tensor:
        """Last top state of every row; the next `feed` overwrites it."""
        top_BD = self._stepper.state.top_BD
        return top_BD if len(self._rows_N) == len(top_BD) else top_BD[self._rows_N]

    def select(self, kept_N: Tensor) -> None:
        """Only the rows at the given places count from now on."""
        self._rows_N = self._rows_N[kept_N]

    def feed(self, tokens_N: Tensor, history: History | None) -> None:
        """Runs a token of each row. None slides, so `history` is not looked at."""
        self._tokens_B.index_copy_(0, self._rows_N, tokens_N)
        self._stepper(self._tokens_B)


def _filled_up(state: DecodeState, rows: int) -> DecodeState:
    """The state with its first row again until there are `rows`, and with documents, as if some were padded."""
    places = torch.arange(rows, device=state.top_BD.device)
    filled = state if rows == len(state.top_BD) else state.select(places.where(places < len(state.top_BD), 0))
    return filled if filled.documents_B is not None else replace(filled, documents_B=torch.zeros_like(filled.positions_B))


def _power_of_two(number: int) -> int:
    """The least one that is not below."""
    return 1 << (number - 1).bit_length()


def _compiled(function: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Compiled for the one shape it is called with. Raises ValueError at the first call if there is no compiler."""
    run, ready = torch.compile(function, fullgraph=True, dynamic=False), False

    def call(tokens_B: Tensor) -> None:
        nonlocal ready
        if ready:
            return run(tokens_B)
        try:
            with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                run(tokens_B)
        except RuntimeError as error:
            if "InvalidCxxCompiler" not in str(error):
                raise
            raise ValueError("compiling the decoding step needs a C++ compiler: install g++ or clang, or decode without it") from None
        ready = True

    return call
