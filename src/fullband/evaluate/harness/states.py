"""Top states of rows under several readings at once: fewer feedback passes are the first of more, so they come free.

`read_whole` reads each row from its first input; `read_shared` reads what a group of rows begins with once, and each row's ending behind
a copy of that cache. By laws 2 and 3 both are the same computation; `read_whole` is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, repeat
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fullband.decode.prompts import AlignedPrompts, align_prompts
from fullband.evaluate.harness.rows import Group, Row
from fullband.feedback.by_passes import states_by_passes, top_states
from fullband.feedback.converged import run_converged
from fullband.feedback.passes import FeedbackModel, Inputs, Pass, PassState, below, check_length, parallel, plain_pass, sequential
from fullband.feedback_config import FeedbackPasses
from fullband.layout import NOWHERE, Layout

# How context and continuation are read: whole after 0, 1, … feedback passes ("exact", "converged"), or as Soft would have made the
# continuation: the context plainly, the continuation with its states fed back.
Reading: TypeAlias = FeedbackPasses | Literal["soft"]


def shareable(model: FeedbackModel, readings: Sequence[Reading]) -> tuple[list[Reading], list[Reading]]:
    """(readings for which a common beginning can be read once, readings that need whole rows)."""
    if not model.trunk.supports_prefix_reuse:
        return [], list(readings)
    return [reading for reading in readings if reading != "converged"], [reading for reading in readings if reading == "converged"]


def read_whole(model: FeedbackModel, rows: Sequence[Row], readings: Sequence[Reading]) -> Iterator[tuple[Reading, Tensor]]:
    """(reading, top states [B, T, D]) of rows padded at the right, for each of `readings`."""
    lengths = [len(row.inputs) for row in rows]
    check_length(model, max(lengths))
    tokens_BT = _padded_right(model, [row.inputs for row in rows])
    counted: list[FeedbackPasses] = [reading for reading in readings if reading != "soft" and reading != "converged"]
    yield from states_by_passes(model, tokens_BT, counted)
    if "soft" in readings:
        plain_BT = _before([row.start for row in rows], tokens_BT)
        # Without a cache to step from: n passes make the first n fused positions exact (law 2), as many as a continuation feeds back.
        fused = max(len(row.inputs) - row.start for row in rows)
        yield "soft", top_states(model, tokens_BT, "exact" if model.trunk.supports_prefix_reuse else fused, Layout(plain_BT=plain_BT))
    if "converged" in readings:
        yield "converged", run_converged(model, below(model, tokens_BT)[0], torch.tensor(lengths)).top_BTD


def read_shared(model: FeedbackModel, groups: Sequence[Group], readings: Sequence[Reading]) -> Iterator[tuple[Reading, Tensor]]:
    """(reading, top states [B, T, D]) of the endings of all rows, group by group, after what their group shares; padded at the right.

    Pass k goes on from the cache that pass k left after the beginning, and is fed what pass k - 1 left; no older cache is needed.
    """
    beginnings = align_prompts(model.trunk, [group.rows[0].inputs[: group.shared] for group in groups])
    inputs, lower = below(model, beginnings.tokens_BT, beginnings.layout, keep="window")
    endings = _Endings.of(model, groups, beginnings, lower)
    deepest = max((reading for reading in readings if isinstance(reading, int)), default=-1)
    if deepest >= 0 or "soft" in readings:
        plain = plain_pass(model, inputs, keep="window")
        later = chain([plain], parallel(model, inputs, plain, repeat(Pass(keep="window"))))
        states = (endings.after(PassState(output.cache, model.connection.roll(None, output.states_BTD))) for output in later)
        state = next(states)
        if "soft" in readings:
            yield "soft", endings.exactly(model, state, endings.plain_BT)
        if deepest >= 0:
            first = plain_pass(model, endings.inputs, state.cache)
            if 0 in readings:
                yield 0, first.top_BTD
            befores = (Pass(before_BWD=fed.before_BWD, cache=own.cache) for fed, own in pairwise(chain([state], states)))
            passes = parallel(model, endings.inputs, first, islice(befores, deepest))
            yield from ((k, output.top_BTD) for k, output in enumerate(passes, start=1) if k in readings)
    if "exact" in readings:
        state = sequential(model, inputs)[0]
        yield "exact", endings.exactly(model, endings.after(state))


@dataclass(frozen=True)
class _Endings:
    """What rows have after their group's beginning.

    group_B     the group of each row
    inputs      padding at the right, which nothing before it sees; documents where beginnings are padded
    plain_BT    where a row's context goes on: Soft runs that without feedback
    """

    group_B: Tensor
    inputs: Inputs
    plain_BT: Tensor

    @staticmethod
    def of(model: FeedbackModel, groups: Sequence[Group], beginnings: AlignedPrompts, lower: Any) -> _Endings:
        rows = [(number, row, row.inputs[group.shared :]) for number, group in enumerate(groups) for row in group.rows]
        tokens_BT = _padded_right(model, [ending for *_, ending in rows])
        device = tokens_BT.device
        group_B = torch.tensor([number for number, *_ in rows], device=device)
        layout = NOWHERE
        if beginnings.layout.documents_BT is not None:
            longest_B = torch.tensor([len(ending) for *_, ending in rows], device=device)
            places_BT = torch.arange(tokens_BT.shape[1], device=device)[None].minimum(longest_B[:, None] - 1)  # none beyond the context
            layout = Layout(beginnings.lengths_B[group_B][:, None] + places_BT, torch.zeros_like(tokens_BT))
        inputs, _ = below(model, tokens_BT, layout, None if lower is None else lower.select(group_B))
        plain_BT = _before([row.start - groups[number].shared for number, row, _ in rows], tokens_BT)
        return _Endings(group_B, inputs, plain_BT)

    def after(self, state: PassState) -> PassState:
        """Where a pass stands after the beginnings, for each row that goes on from there."""
        return state.select(self.group_B)

    def exactly(self, model: FeedbackModel, state: PassState, plain_BT: Tensor | None = None) -> Tensor:
        """Top states position by position; `plain_BT` that all rows begin with are one step."""
        lead = 0 if plain_BT is None else int(plain_BT.all(dim=0).long().cumprod(dim=0).sum())
        inputs = replace(self.inputs, layout=self.inputs.layout.with_plain(plain_BT))
        parts = []
        if lead:
            state, output = sequential(model, inputs[:lead], state, feeds_back=False)
            parts.append(output.top_BTD)
        if lead < inputs.length:
            parts.append(sequential(model, inputs[lead:], state)[1].top_BTD)
        return torch.cat(parts, dim=1)


def _padded_right(model: FeedbackModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids [B, T], 0 in padding."""
    tokens_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, tokens_T in zip(rows, tokens_BT, strict=True):
        tokens_T[: len(row)] = torch.tensor(row)
    return tokens_BT.to(model.trunk.device)


def _before(starts: Sequence[int], tokens_BT: Tensor) -> Tensor:
    """True in the first `starts[b]` slots of row b."""
    device = tokens_BT.device
    return torch.arange(tokens_BT.shape[1], device=device)[None] < torch.tensor(starts, device=device)[:, None]
