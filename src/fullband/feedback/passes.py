"""Passes: shift what is carried by one, merge it at the entry, run what lies above (Eqs. 9-11). `fused_pass` is the only place that does
it. Parallel passes go over many positions again and again (`parallel`), the sequential recurrence goes position by position
(`sequential`), converged passes refine a sliding window (`converged.py`); training, prefill, decoding and diagnostics call these.

What lies below the entry is the same in every pass: `below` runs it once, and hands `Inputs` on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fullband.feedback.connection import Connection
from fullband.layout import NOWHERE, Layout, plain_slots
from fullband.trunk.protocol import Keep, Trunk


class FeedbackModel(Protocol):
    """What feedback needs: a trunk, and the connection that feeds its states back."""

    @property
    def trunk(self) -> Trunk: ...

    @property
    def connection(self) -> Connection: ...


@dataclass(frozen=True)
class Inputs:
    """T positions that the layers below the entry have run over.

    x_BTD    the residual stream at the entry
    layout   where they stand
    carried  the streams at source depths below the entry
    """

    x_BTD: Tensor
    layout: Layout
    carried: tuple[Tensor, ...] = ()

    def __getitem__(self, here: slice) -> Inputs:
        """The same positions of all sequences."""
        return Inputs(self.x_BTD[:, here], self.layout[:, here], tuple(stream[:, here] for stream in self.carried))

    @property
    def length(self) -> int:
        return self.x_BTD.shape[1]


@dataclass(frozen=True)
class PassState:
    """Where one pass stands after some positions; at the start of sequences it is empty.

    cache       of the layers above the entry
    before_BWD  states of the last W positions, which the next ones are fed with: this pass's own in the sequential recurrence, and in the
                pass after this one where passes are parallel
    """

    cache: Any = None
    before_BWD: Tensor | None = None

    def select(self, rows: Tensor) -> PassState:
        cache = None if self.cache is None else self.cache.select(rows)
        return PassState(cache, None if self.before_BWD is None else self.before_BWD[rows])


class PassOutput(NamedTuple):
    """Of the positions of a pass: top states [B, T, D], the states that are carried on [B, T, D] (the same tensor where those are the top
    states), and the cache or None."""

    top_BTD: Tensor
    states_BTD: Tensor
    cache: Any = None


def below(model: FeedbackModel, given: Tensor, layout: Layout = NOWHERE, cache: Any = None, keep: Keep = "none") -> tuple[Inputs, Any]:
    """(inputs, the cache of the layers below the entry) of tokens [B, T] or embeddings [B, T, D]."""
    lower = model.trunk.below(given, layout, cache, keep)
    return Inputs(lower.x_BTD, layout, lower.carried), lower.cache


def plain_pass(model: FeedbackModel, inputs: Inputs, cache: Any = None, keep: Keep = "none") -> PassOutput:
    """A pass without feedback: pass 1."""
    output = model.trunk.above(inputs.x_BTD, inputs.layout, cache, keep)
    return PassOutput(output.top_BTD, model.connection.take(output, inputs.carried), output.cache)


def fused_pass(
    model: FeedbackModel,
    inputs: Inputs,
    states_BTD: Tensor | None,
    before_BWD: Tensor | None = None,
    cache: Any = None,
    keep: Keep = "none",
    noise_BTD: Tensor | None = None,
) -> PassOutput:
    """One pass with feedback over T positions.

    states_BTD   states of these positions in the pass before (the last one is not used); None for T = 1
    before_BWD   states of the W positions before the first; None where the sequences begin here
    noise_BTD    jitter added to what is carried (Eq. 13)
    """
    connection, x_BTD, layout = model.connection, inputs.x_BTD, inputs.layout
    if connection.window > 1 and layout.positions_BT is None:
        first = 0 if cache is None else cache.length
        layout = replace(layout, positions_BT=torch.arange(first, first + inputs.length, device=x_BTD.device)[None])
    assert states_BTD is not None or inputs.length == 1
    carried_BTD = connection.shift(x_BTD if states_BTD is None else states_BTD, before_BWD, layout)
    if noise_BTD is not None:
        carried_BTD = carried_BTD + noise_BTD
    plain_BT = plain_slots(inputs.layout, before_BWD is None, inputs.length, x_BTD.device)

    def merged(place: int, x: Tensor) -> Tensor:
        fed = connection.merge(x, carried_BTD, model.trunk, place)
        return fed if plain_BT is None else torch.where(plain_BT[..., None], x.to(fed.dtype), fed)

    later = connection.entries[1:]
    merges = {depth: (lambda x, place=place: merged(place, x)) for place, depth in enumerate(later, start=1)} if later else None
    output = model.trunk.above(merged(0, x_BTD), inputs.layout, cache, keep, merges)
    return PassOutput(output.top_BTD, connection.take(output, inputs.carried), output.cache)


@dataclass(frozen=True)
class Pass:
    """What one of several parallel passes does in a way of its own.

    start       the first position that it runs over; those before it are the first pass's
    before_BWD  states of the pass before, at the positions before position 0 of these
    cache       its own, of the positions before `start`
    plain_BT    positions from `start` on without feedback, in place of the layout's
    noise_BTD   jitter of the positions from `start` on
    """

    start: int = 0
    before_BWD: Tensor | None = None
    cache: Any = None
    keep: Keep = "none"
    plain_BT: Tensor | None = None
    noise_BTD: Tensor | None = None


PLAIN_PASS = Pass()


def parallel(model: FeedbackModel, inputs: Inputs, first: PassOutput, passes: Iterable[Pass] = repeat(PLAIN_PASS)) -> Iterator[PassOutput]:
    """The passes after `first`, each over the positions from its start on and fed with the states of the pass before it; without end, in
    constant memory, unless `passes` ends."""
    previous_BTD = first.states_BTD
    for each in passes:
        here = inputs[each.start :] if each.start else inputs
        if each.plain_BT is not None:
            here = replace(here, layout=here.layout.with_plain(each.plain_BT))
        before_BWD = model.connection.roll(each.before_BWD, previous_BTD[:, : each.start]) if each.start else each.before_BWD
        output = fused_pass(model, here, previous_BTD[:, each.start :], before_BWD, each.cache, each.keep, each.noise_BTD)
        yield output
        previous_BTD = torch.cat([first.states_BTD[:, : each.start], output.states_BTD], dim=1) if each.start else output.states_BTD


def sequential(
    model: FeedbackModel, inputs: Inputs, state: PassState = PassState(), keep: Keep = "window", feeds_back: bool = True
) -> tuple[PassState, PassOutput]:
    """The sequential recurrence (Eq. 8), one token or many: each position waits for the one before it. (The state after them; their top
    states and states.) Without feedback all positions are run at once."""
    outputs = []
    for here in (inputs[t : t + 1] for t in range(inputs.length)) if feeds_back and inputs.length > 1 else (inputs,):
        if feeds_back:
            output = fused_pass(model, here, None, state.before_BWD, state.cache, keep)
        else:
            output = plain_pass(model, here, state.cache, keep)
        state = PassState(output.cache, model.connection.roll(state.before_BWD, output.states_BTD))
        outputs.append(output)
    if len(outputs) == 1:
        return state, outputs[0]
    top_BTD = torch.cat([output.top_BTD for output in outputs], dim=1)
    same = outputs[0].states_BTD is outputs[0].top_BTD
    return state, PassOutput(top_BTD, top_BTD if same else torch.cat([output.states_BTD for output in outputs], dim=1), state.cache)


def passes_over(
    model: FeedbackModel, inputs: Inputs, states: Sequence[PassState], keep: Keep, more: bool = True
) -> tuple[list[PassState], list[PassOutput]]:
    """Every pass over the next positions: `states` are those of pass 1 (without feedback), 2, … before them. (The states after; the passes'
    outputs.) Without `more` positions to come, only the last pass keeps its cache."""
    earlier: Keep = keep if more else "none"
    keeps = [*[earlier] * (len(states) - 1), keep]
    output = plain_pass(model, inputs, states[0].cache, keeps[0])
    plan = (Pass(0, before.before_BWD, own.cache, kept) for before, own, kept in zip(states, states[1:], keeps[1:], strict=False))
    outputs = [output, *parallel(model, inputs, output, plan)]
    roll = model.connection.roll
    after = [PassState(done.cache, roll(state.before_BWD, done.states_BTD)) for state, done in zip(states, outputs, strict=True)]
    return after, outputs


def check_length(model: FeedbackModel, length: int) -> None:
    """Raises ValueError if a sequence of `length` tokens does not fit the trunk's context."""
    if length > model.trunk.context:
        raise ValueError(f"{length} tokens do not fit the model's context of {model.trunk.context}{model.trunk.context_note}")
