"""Log-likelihoods of continuations, under several readings at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.evaluate.harness.rows import Row, batches_of_groups, batches_of_rows, group_rows, rows_of
from fullband.evaluate.harness.states import Reading, read_shared, read_whole, shareable
from fullband.feedback.by_passes import check_feedback_passes
from fullband.feedback.passes import FeedbackModel


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

    batch_rows  rows of a batch, padded. What rows of it begin with alike is read once, which changes nothing but rounding
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

    def score(rows: Sequence[tuple[Row, int]], found: Iterable[tuple[Reading, Tensor]]) -> None:
        """`found`: states of each row from its input number `first` on."""
        for reading, states_BTD in found:
            for (row, first), states_TD in zip(rows, states_BTD, strict=True):
                for place in row.places:
                    tokens = requests[place].tokens
                    end = len(row.inputs) - first
                    scores[place][reading] = _score(states_TD[end - len(tokens) : end], model.trunk.head_weight, tokens)

    def ended(rows: Sequence[Row]) -> None:
        places = [place for row in rows for place in row.places]
        if done is not None:
            done(places, [scores[place] for place in places])

    if not requests:
        return scores
    shared, unshared = shareable(model, readings)
    rows = rows_of([_inputs(request, limit) for request in requests])
    # Soft reads a context plainly, once, and only the continuation position by position: that pays for a row of its own, too.
    groups, alone = group_rows(rows, batch_rows, whatever_saved="soft" in shared) if shared else ([], rows)
    for batch in batches_of_groups(groups, batch_rows):
        score([(row, group.shared) for group in batch for row in group.rows], read_shared(model, batch, shared))
        together = [row for group in batch for row in group.rows]
        if unshared:
            score([(row, 0) for row in together], read_whole(model, together, unshared))
        ended(together)
    for whole in batches_of_rows(alone, batch_rows):
        score([(row, 0) for row in whole], read_whole(model, whole, readings))
        ended(whole)
    return scores


def _inputs(request: Continuation, limit: int) -> tuple[tuple[int, ...], int]:
    """(what is read, at most `limit` ids, where the continuation begins in it)."""
    inputs = (request.context + request.tokens)[-(limit + 1) :][:-1]
    return inputs, len(inputs) - len(request.tokens) + 1


def _score(states_ND: Tensor, head_weight_VD: Tensor, tokens: tuple[int, ...]) -> Score:
    logits_NV = F.linear(states_ND, head_weight_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    targets_N = torch.tensor(tokens, device=logits_NV.device)
    log_likelihood = F.log_softmax(logits_NV, dim=-1).gather(1, targets_N[:, None]).double().sum()  # float32 steps by 1e-4 from 1,024 on
    return Score(float(log_likelihood), bool((logits_NV.argmax(dim=-1) == targets_N).all()))
