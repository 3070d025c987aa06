"""What a server needs of a runtime: prompts to states, a token more, states joined and parted. `LocalEngine` is our own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fullband.decode.modes import Mode, step
from fullband.decode.prefill import Prefilled, prefill_reported, run_chunks
from fullband.decode.prompts import align_prompts
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.state import DecodeState


class Prefill(NamedTuple):
    """Prompts that were prefilled: the state after them, and the top states [tokens, D] of each where they were asked for."""

    state: Any
    states: list[Tensor] | None


class Engine(Protocol):
    """A runtime. A state is of several sequences, which all feed back or all do not; only the engine looks into it."""

    @property
    def context(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def prefill(self, prompts: Sequence[Sequence[int]], mode: Mode, wants_states: bool = False) -> Iterator[Prefill | None]:
        """Run prompts in parts: None after each, the whole at last. So long prompts hold up the others for one part at a time."""

    def head(self, states_ND: Tensor) -> Tensor:
        """Logits [N, V] of top states."""

    def top(self, state: Any) -> Tensor:
        """Top states [B, D] of the last tokens: the head makes the next token's logits of them."""

    def step(self, state: Any, tokens_B: Tensor, mode: Mode) -> Any:
        """The state after one more token of each sequence."""

    def join(self, states: Sequence[Any]) -> Any:
        """The sequences of several states in one, in order."""

    def release(self, state: Any, kept: Sequence[int]) -> Any:
        """The state of these sequences, in this order, one perhaps several times; None if there are none."""


class LocalEngine:
    """`Engine` of a model of ours, native or converted, in this process."""

    def __init__(self, model: FeedbackModel, chunk: int = 512):
        """`chunk`: positions of a prompt that are run at a time."""
        self.model, self.chunk = model, chunk

    @property
    def context(self) -> int:
        return self.model.trunk.context

    @property
    def vocab_size(self) -> int:
        return self.model.trunk.vocab_size

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], mode: Mode, wants_states: bool = False) -> Iterator[Prefill | None]:
        aligned = align_prompts(self.model.trunk, prompts)
        if mode.feedback_passes == "converged":
            if wants_states:
                raise ValueError("feedback_passes: 'converged' gives no log-probabilities of the prompt; use a number or 'exact'")
            yield Prefill(prefill_reported(self.model, aligned, "converged")[0], None)
            return
        parts = []
        for done, output in run_chunks(self.model, aligned, Prefilled.empty(mode.feedback_passes), self.chunk):  # noqa: B007
            if wants_states:
                parts.append(output.top_BTD)
            yield None
        top_BTD = torch.cat(parts, dim=1) if wants_states else None
        states = None if top_BTD is None else [row[-len(prompt) :] for row, prompt in zip(top_BTD, prompts, strict=True)]
        yield Prefill(done.state(aligned, output.top_BTD[:, -1]), states)

    def head(self, states_ND: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model.trunk.head(states_ND)

    def top(self, state: DecodeState) -> Tensor:
        return state.top_BD

    def step(self, state: DecodeState, tokens_B: Tensor, mode: Mode) -> DecodeState:
        return step(self.model, state, tokens_B.to(state.top_BD.device), mode)

    def join(self, states: Sequence[DecodeState]) -> DecodeState:
        return states[0] if len(states) == 1 else DecodeState.join(list(states))

    def release(self, state: DecodeState, kept: Sequence[int]) -> DecodeState | None:
        return state.select(torch.tensor(list(kept), device=state.top_BD.device)) if kept else None
