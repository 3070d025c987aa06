"""What a server needs of a runtime: prompts to states, a token more, states joined and parted. `LocalEngine` is our own."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from fullband.decode.modes import Mode, step
from fullband.decode.prefill import Prefilled, align_after, prefill_reported, run_chunks, state_after
from fullband.decode.prompts import align_prompts
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.state import DecodeState
from fullband.feedback_config import FeedbackPasses
from fullband.serve.prefixes import Prefix, PrefixCache

EXACT_COST = 16  # of a position that waits for the one before it, in positions that are run together, about


class Prefill(NamedTuple):
    """Prompts that were prefilled.

    state    after them
    states   top states [tokens, D] of each, where they were asked for
    cached   how many tokens of each were not run, as a prompt that is kept begins with them
    """

    state: Any
    states: list[Tensor] | None
    cached: Sequence[int]


class Engine(Protocol):
    """A runtime. A state is of several sequences, which all feed back or all do not; only the engine looks into it."""

    @property
    def context(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kept_bytes(self) -> int:
        """Of prompts that are kept for later ones which begin as they do."""

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

    def __init__(self, model: FeedbackModel, chunk: int = 512, prefix_bytes: int = 0):
        """`chunk`: positions of a prompt that are run at a time, fewer where each is run again and again; `prefix_bytes`: of prompts that
        may be kept for later ones, which needs a model without recurrent layers."""
        self.model, self.chunk = model, chunk
        self.prefixes = PrefixCache(prefix_bytes if model.trunk.can_crop_cache else 0)

    @property
    def context(self) -> int:
        return self.model.trunk.context

    @property
    def vocab_size(self) -> int:
        return self.model.trunk.vocab_size

    @property
    def kept_bytes(self) -> int:
        return self.prefixes.bytes

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], mode: Mode, wants_states: bool = False) -> Iterator[Prefill | None]:
        if self.prefixes.limit and not wants_states and mode.feedback_passes != "converged":
            yield from self._prefill_sharing(prompts, mode.feedback_passes)
            return
        aligned, none = align_prompts(self.model.trunk, prompts), [0] * len(prompts)
        if mode.feedback_passes == "converged":
            if wants_states:
                raise ValueError("feedback_passes: 'converged' gives no log-probabilities of the prompt; use a number or 'exact'")
            yield Prefill(prefill_reported(self.model, aligned, "converged")[0], None, none)
            return
        parts = []
        for done, outputs in run_chunks(self.model, aligned, Prefilled.empty(mode.feedback_passes), self._part(mode.feedback_passes)):  # noqa: B007
            if wants_states:
                parts.append(outputs[-1].top_BTD)
            yield None
        top_BTD = torch.cat(parts, dim=1) if wants_states else None
        states = None if top_BTD is None else [row[-len(prompt) :] for row, prompt in zip(top_BTD, prompts, strict=True)]
        yield Prefill(done.state(aligned, outputs[-1].top_BTD[:, -1]), states, none)

    def _prefill_sharing(self, prompts: Sequence[Sequence[int]], passes: FeedbackPasses) -> Iterator[Prefill | None]:
        """`prefill` from kept beginnings on; prompts that go on from the same one are run together."""
        found = [self.prefixes.find(passes, prompt) for prompt in prompts]
        order: list[int] = []
        states: list[DecodeState] = []
        for begin in dict.fromkeys(found):
            rows = [row for row, other in enumerate(found) if other == begin]
            state = yield from self._prefill_after(*begin, [prompts[row] for row in rows], passes)
            order, states = order + rows, [*states, state]
        joined = self.join(states)
        if order != sorted(order):
            joined = joined.select(torch.tensor(order, device=joined.top_BD.device).argsort())
        yield Prefill(joined, None, [length for _, length in found])

    def _prefill_after(
        self, prefix: Prefix | None, length: int, prompts: Sequence[Sequence[int]], passes: FeedbackPasses
    ) -> Generator[None, None, DecodeState]:
        """The state after prompts that begin with the first `length` tokens of a prefix."""
        model = self.model
        aligned = align_after(model, length, [prompt[length:] for prompt in prompts])
        start = Prefilled.empty(passes) if prefix is None else prefix.first(length, model.connection)
        if prefix is not None and len(prompts) > 1:
            start = start.select(torch.zeros_like(aligned.lengths_B))
        parts = []
        for done, outputs in run_chunks(model, aligned, start, self._part(passes), "all", goes_on=True):  # noqa: B007
            parts.append([outputs[-1].top_BTD, *(output.states_BTD for output in outputs)])
            yield None
        top_BTD, *states = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        begun = [] if prefix is None else [prefix.states]
        for row, prompt in enumerate(prompts):
            own = [states_BTD[row : row + 1, : len(prompt) - length] for states_BTD in states]
            whole = [
                torch.cat([*(states_1TD[:, :length] for states_1TD in before), after], 1)
                for *before, after in zip(*begun, own, strict=True)
            ]
            self.prefixes.keep(passes, prompt, done, row, whole)
        return state_after(start, aligned, length, done, top_BTD, states[-1], "window")

    @torch.no_grad()
    def put_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Put these tensors (`serve.weights.new_weights`) in the place of the model's, and forget prompts that are kept: they were run with
        the old ones."""
        own = cast(nn.Module, self.model).state_dict()
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        self.prefixes = PrefixCache(self.prefixes.limit)

    def _part(self, passes: FeedbackPasses) -> int:
        """Positions between two of the others' tokens."""
        return max(1, self.chunk // (EXACT_COST if passes == "exact" else max(1, int(passes))))

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
