"""Top states of rows under several readings at once: fewer feedback passes are the first of more, so they come free.

`read_whole` reads each row from its first input; `read_shared` reads what a group of rows begins with once, and each row's ending behind
a copy of that cache. By laws 2 and 3 both are the same computation; `read_whole` is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fullband.config import FeedbackPasses
from fullband.decode.prefill import Lane, prefill_aligned
from fullband.decode.prompts import AlignedPrompts, align_prompts
from fullband.evaluate.harness.rows import Group, Row
from fullband.feedback.converged import read_converged
from fullband.feedback.passes import FeedbackModel, check_length, fused_pass, iterate_passes, read

# How context and continuation are read: whole after 0, 1, … feedback passes ("exact", "converged"), or as Soft would have made the
# continuation: the context plainly, the continuation with its states fed back.
Reading: TypeAlias = FeedbackPasses | Literal["soft"]


def shareable(model: FeedbackModel, readings: Sequence[Reading]) -> tuple[list[Reading], list[Reading]]:
    """(readings for which a common beginning can be read once, readings that need whole rows)."""
    if not model.trunk.reuses:
        return [], list(readings)
    return [reading for reading in readings if reading != "converged"], [reading for reading in readings if reading == "converged"]


def read_whole(model: FeedbackModel, rows: Sequence[Row], readings: Sequence[Reading]) -> Iterator[tuple[Reading, Tensor]]:
    """(reading, top states [B, T, D]) of rows padded at the right, for each of `readings`."""
    lengths = [len(row.inputs) for row in rows]
    check_length(model, max(lengths))
    tokens_BT = _padded_behind(model, [row.inputs for row in rows])
    deepest = _deepest(readings)
    if deepest >= 0:
        for passes, states_BTD in enumerate(iterate_passes(model, tokens_BT)):
            if passes in readings:
                yield passes, states_BTD
            if passes == deepest:
                break
    for reading in readings:
        if reading == "soft":
            plain_BT = _before([row.start for row in rows], tokens_BT)
            # Without a cache to step from: n passes make the first n fused positions exact (law 2), as many as a continuation feeds back.
            fused = max(len(row.inputs) - row.start for row in rows)
            yield reading, read(model, tokens_BT, "exact" if model.trunk.reuses else fused, plain_BT=plain_BT)
        elif reading == "converged":
            yield reading, read_converged(model, tokens_BT, torch.tensor(lengths))[0]
        elif reading == "exact":
            yield reading, read(model, tokens_BT, "exact")


def read_shared(model: FeedbackModel, groups: Sequence[Group], readings: Sequence[Reading]) -> Iterator[tuple[Reading, Tensor]]:
    """(reading, top states [B, T, D]) of the endings of all rows, group by group, behind what their group shares; padded at the right."""
    beginnings = align_prompts(model.trunk, [group.rows[0].inputs[: group.shared] for group in groups])
    endings = _Endings.of(model, groups, beginnings)
    deepest = _deepest(readings)
    states_BTD = boundary_BD = None
    for passes, lane in zip(range(max(deepest + 1, "soft" in readings)), _by_passes(model, beginnings), strict=False):
        # Pass k goes on from what pass k left behind the beginning, and is fed what pass k - 1 left; no older cache is needed.
        behind = endings.behind(lane)
        if passes == 0 and "soft" in readings:
            yield "soft", _endings_exact(model, endings, behind, endings.plain_BT)
        if passes > deepest:
            break
        states_BTD = _one_pass(model, endings, behind.cache, states_BTD, boundary_BD)
        boundary_BD = behind.boundary_BD
        if passes in readings:
            yield passes, states_BTD
    if "exact" in readings:
        state = prefill_aligned(model, beginnings, "exact")
        yield "exact", _endings_exact(model, endings, endings.behind(Lane(state.cache, state.top_BD)))


@dataclass(frozen=True)
class _Endings:
    """What rows read behind their group's beginning.

    group_B        the group of each row
    embeddings     [B, T, D]; padding at the right, which nothing before it sees
    positions_BT   None = the slots behind the cache, one document a row
    documents_BT   0 everywhere, for caches with padding
    plain_BT       where a row's context goes on: Soft reads that plainly
    """

    group_B: Tensor
    embeddings_BTD: Tensor
    positions_BT: Tensor | None
    documents_BT: Tensor | None
    plain_BT: Tensor

    @staticmethod
    def of(model: FeedbackModel, groups: Sequence[Group], beginnings: AlignedPrompts) -> _Endings:
        rows = [(number, row, row.inputs[group.shared :]) for number, group in enumerate(groups) for row in group.rows]
        tokens_BT = _padded_behind(model, [ending for *_, ending in rows])
        device = tokens_BT.device
        group_B = torch.tensor([number for number, *_ in rows], device=device)
        positions_BT = documents_BT = None
        if beginnings.documents_BT is not None:
            longest_B = torch.tensor([len(ending) for *_, ending in rows], device=device)
            places_BT = torch.arange(tokens_BT.shape[1], device=device)[None].minimum(longest_B[:, None] - 1)  # none beyond the context
            positions_BT = beginnings.lengths_B[group_B][:, None] + places_BT
            documents_BT = torch.zeros_like(tokens_BT)
        return _Endings(
            group_B,
            model.trunk.embed(tokens_BT),
            positions_BT,
            documents_BT,
            _before([row.start - groups[number].shared for number, row, _ in rows], tokens_BT),
        )

    def behind(self, lane: Lane) -> Lane:
        """A lane of the beginnings, for each row that goes on from it."""
        assert lane.cache is not None and lane.boundary_BD is not None
        return Lane(lane.cache.select(self.group_B), lane.boundary_BD[self.group_B])


def _by_passes(model: FeedbackModel, beginnings: AlignedPrompts) -> Iterator[Lane]:
    """What pass 0 (plain), 1, 2, … leaves behind the beginnings, without end, in constant memory."""
    embeddings_BTD = model.trunk.embed(beginnings.tokens_BT)
    positions_BT, documents_BT = beginnings.positions_BT, beginnings.documents_BT
    states_BTD, cache = model.trunk(embeddings_BTD, positions_BT, documents_BT, keep="window")
    while True:
        yield Lane(cache, states_BTD[:, -1])
        states_BTD, cache = fused_pass(model, embeddings_BTD, states_BTD, None, positions_BT, documents_BT, keep="window")


def _one_pass(
    model: FeedbackModel,
    endings: _Endings,
    cache: Any,
    states_BTD: Tensor | None,
    boundary_BD: Tensor | None,
) -> Tensor:
    """States after one more pass; the first one, on no states, is plain. The cache stays as it is."""
    embeddings_BTD, positions_BT, documents_BT = endings.embeddings_BTD, endings.positions_BT, endings.documents_BT
    if states_BTD is None:
        return model.trunk(embeddings_BTD, positions_BT, documents_BT, cache)[0]
    return fused_pass(model, embeddings_BTD, states_BTD, boundary_BD, positions_BT, documents_BT, cache)[0]


def _endings_exact(model: FeedbackModel, endings: _Endings, behind: Lane, plain_BT: Tensor | None = None) -> Tensor:
    """Position by position; `plain_BT` that all rows begin with are one step."""
    cache, boundary_BD = behind.cache, behind.boundary_BD
    count = endings.embeddings_BTD.shape[1]
    lead = 0 if plain_BT is None else int(plain_BT.all(dim=0).long().cumprod(dim=0).sum())
    stops = [*([lead] if lead else []), *range(lead + 1, count + 1)]
    states = []
    for start, stop in pairwise([0, *stops]):
        here = slice(start, stop)
        rows = (endings.positions_BT, endings.documents_BT, plain_BT)
        positions, documents, plain = (None if row is None else row[:, here] for row in rows)
        tokens_BTD = endings.embeddings_BTD[:, here]
        states_BTD, cache = fused_pass(model, tokens_BTD, tokens_BTD, boundary_BD, positions, documents, cache, "window", plain)
        boundary_BD = states_BTD[:, -1]
        states.append(states_BTD)
    return torch.cat(states, dim=1)


def _deepest(readings: Sequence[Reading]) -> int:
    """The most feedback passes that are asked for; -1 if none are counted."""
    return max((reading for reading in readings if isinstance(reading, int)), default=-1)


def _padded_behind(model: FeedbackModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids [B, T], 0 in padding."""
    tokens_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, tokens_T in zip(rows, tokens_BT, strict=True):
        tokens_T[: len(row)] = torch.tensor(row)
    return tokens_BT.to(model.trunk.head_weight.device)


def _before(starts: Sequence[int], tokens_BT: Tensor) -> Tensor:
    """True in the first `starts[b]` slots of row b."""
    device = tokens_BT.device
    return torch.arange(tokens_BT.shape[1], device=device)[None] < torch.tensor(starts, device=device)[:, None]
