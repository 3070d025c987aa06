"""Log-likelihoods of continuations, under several readings at once: fewer feedback passes are the first of more, so they come free."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.config import FeedbackPasses
from fullband.feedback.converged import read_converged
from fullband.feedback.passes import FeedbackModel, check_feedback_passes, check_length, iterate_passes, read

# How context and continuation are read: whole after 0, 1, … feedback passes ("exact", "converged"), or as Soft would have made the
# continuation: the context plainly, the continuation with its states fed back.
Reading: TypeAlias = FeedbackPasses | Literal["soft"]
MOST_SOFT_PASSES = 16  # above it, a continuation is read position by position


@dataclass(frozen=True)
class Continuation:
    """Ids of a context, at least one, and of what follows it."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.context}{self.tokens}".encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Score:
    """Σ log p of a continuation's tokens, in nats, and whether each of them is the likeliest."""

    log_likelihood: float
    greedy: bool


@dataclass(frozen=True)
class _Row:
    """Inputs that one or several requests read: those that differ in their last token alone share it.

    start   position of the first input of a continuation; before it, Soft reads plainly
    places  of the requests
    """

    inputs: tuple[int, ...]
    start: int
    places: list[int]


@torch.no_grad()
def score_continuations(
    model: FeedbackModel,
    requests: Sequence[Continuation],
    readings: Sequence[Reading],
    batch_rows: int = 8,
    max_length: int | None = None,
    done: Callable[[list[int], list[dict[Reading, Score]]], None] | None = None,
) -> list[dict[Reading, Score]]:
    """A score for each request and reading.

    batch_rows  rows of a batch, padded at the right: what follows a position does not change it
    max_length  inputs that are read; of longer ones the last ones are. None = the model's context
    done        gets the places and scores of each batch as soon as they are known

    Raises ValueError for a reading that does not exist, and for a continuation that is empty or longer than `max_length`.
    """
    for reading in readings:
        if reading != "soft":
            check_feedback_passes(reading)
    limit = max_length or model.trunk.context
    for request in requests:
        if not request.context or not 0 < len(request.tokens) <= limit:
            raise ValueError(f"a continuation has 1 to {limit} tokens and a context before it, not {len(request.tokens)}")
    scores: list[dict[Reading, Score]] = [{} for _ in requests]
    for rows in _batches(_rows(requests, limit), batch_rows):
        for reading, states_BTD in _states(model, rows, readings):
            for row, states_TD in zip(rows, states_BTD, strict=True):
                for place in row.places:
                    tokens = requests[place].tokens
                    scored = states_TD[len(row.inputs) - len(tokens) : len(row.inputs)]
                    scores[place][reading] = _score(scored, model.trunk.head_weight, tokens)
        if done is not None:
            places = [place for row in rows for place in row.places]
            done(places, [scores[place] for place in places])
    return scores


def _rows(requests: Sequence[Continuation], limit: int) -> list[_Row]:
    """Longest first: a batch then has little padding, and the first one shows the memory needed."""
    rows: dict[tuple[tuple[int, ...], int], _Row] = {}
    for place, request in enumerate(requests):
        inputs = (request.context + request.tokens)[-(limit + 1) :][:-1]
        start = len(inputs) - len(request.tokens) + 1
        rows.setdefault((inputs, start), _Row(inputs, start, [])).places.append(place)
    return sorted(rows.values(), key=lambda row: (-len(row.inputs), row.inputs))


def _batches(rows: list[_Row], size: int) -> Iterator[list[_Row]]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _states(model: FeedbackModel, rows: list[_Row], readings: Sequence[Reading]) -> Iterator[tuple[Reading, Tensor]]:
    """(reading, top states [B, T, D]) of rows padded at the right."""
    lengths = [len(row.inputs) for row in rows]
    check_length(model, max(lengths))
    device = model.trunk.head_weight.device
    tokens_BT = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for row, tokens_T in zip(rows, tokens_BT, strict=True):
        tokens_T[: len(row.inputs)] = torch.tensor(row.inputs)
    tokens_BT = tokens_BT.to(device)
    deepest = max((reading for reading in readings if isinstance(reading, int)), default=-1)
    if deepest >= 0:
        for passes, states_BTD in enumerate(iterate_passes(model, tokens_BT)):
            if passes in readings:
                yield passes, states_BTD
            if passes == deepest:
                break
    for reading in readings:
        if reading == "soft":
            yield reading, _read_soft(model, tokens_BT, rows)
        elif reading == "converged":
            yield reading, read_converged(model, tokens_BT, torch.tensor(lengths))[0]
        elif reading == "exact":
            yield reading, read(model, tokens_BT, "exact")


def _read_soft(model: FeedbackModel, tokens_BT: Tensor, rows: list[_Row]) -> Tensor:
    """n passes make the first n fused positions exact (law 2), so as many as the longest continuation feeds back make all exact."""
    starts_B1 = torch.tensor([row.start for row in rows], device=tokens_BT.device)[:, None]
    plain_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None] < starts_B1
    fused = max(len(row.inputs) - row.start for row in rows)
    return read(model, tokens_BT, fused if fused <= MOST_SOFT_PASSES else "exact", plain_BT=plain_BT)


def _score(states_ND: Tensor, head_weight_VD: Tensor, tokens: tuple[int, ...]) -> Score:
    logits_NV = F.linear(states_ND, head_weight_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    targets_N = torch.tensor(tokens, device=logits_NV.device)
    log_likelihood = F.log_softmax(logits_NV, dim=-1).gather(1, targets_N[:, None]).sum()
    return Score(float(log_likelihood), bool((logits_NV.argmax(dim=-1) == targets_N).all()))
