"""Prefill: read the prompts, return the state from which decoding goes on (section 4.2, Listing 2).

The prompt is read plainly, then in `feedback_passes` fused passes, each of which rebuilds every key and value from position 0 on and
fuses the last prompt position too (law 6); or position by position ("exact", Eq. 8). Long prompts are read in chunks. Between chunks
each pass keeps what it needs of the past: its own cache, and its own last state, from which the *next* pass makes the first input of
the next chunk. So chunked and whole reading are the same computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fullband.config import FeedbackPasses
from fullband.decode.prompts import AlignedPrompts, TokenLists, align_prompts
from fullband.feedback.converged import MAX_PASSES, WINDOW, ConvergedReport, read_converged
from fullband.feedback.passes import FeedbackModel, check_feedback_passes, fused_pass
from fullband.feedback.state import DecodeState
from fullband.trunk.protocol import Keep

CacheKeep = Literal["window", "all"]  # decoding cannot go on without a cache


@dataclass(frozen=True)
class Lane:
    """What one pass remembers between chunks: its cache, and its state [B, D] in the slot before the next chunk (None at the start)."""

    cache: Any | None = None
    boundary_BD: Tensor | None = None


@torch.no_grad()
def prefill(
    model: FeedbackModel,
    prompts: TokenLists | Tensor,
    feedback_passes: FeedbackPasses = 0,
    chunk: int | None = None,
    mask: Tensor | None = None,
    keep: CacheKeep = "window",
) -> DecodeState:
    """The decode state behind the last token of every prompt.

    prompts          lists of ids, or a LongTensor [B, T] with `mask` [B, T] (True = token), padded on either side
    feedback_passes  0 = plain reading (Standard, Soft), k ≥ 1 = fused passes (Fused), "exact" = position by position,
                     "converged" = passes until the states stop moving
    chunk            positions read at a time (None = all); the result does not depend on it, the memory used does
    keep             "window" lets sliding layers forget what no later token can see; "all" allows the cache to be cropped

    Raises ValueError for a prompt that is empty, longer than the context or outside the vocabulary, and for other settings.
    """
    return prefill_aligned(model, align_prompts(model.trunk, prompts, mask), feedback_passes, chunk, keep)


@torch.no_grad()
def prefill_aligned(
    model: FeedbackModel,
    aligned: AlignedPrompts,
    feedback_passes: FeedbackPasses = 0,
    chunk: int | None = None,
    keep: CacheKeep = "window",
) -> DecodeState:
    """`prefill` of prompts that are aligned already."""
    if feedback_passes == "converged":
        return prefill_converged(model, aligned, keep=keep)[0]
    lane = Lane()
    for after, _ in _read_chunks(model, aligned, feedback_passes, chunk, keep):
        lane = after  # earlier chunks' states are dropped
    return _prefilled(aligned, lane)


@torch.no_grad()
def prefill_converged(
    model: FeedbackModel,
    aligned: AlignedPrompts,
    tolerance: float = 1e-3,
    window: int = WINDOW,
    max_passes: int = MAX_PASSES,
    keep: CacheKeep = "window",
) -> tuple[DecodeState, ConvergedReport]:
    """The decode state to which fused passes over the prompts converge, and what that took (`read_converged`)."""
    state, _, report = _read_converged(model, aligned, tolerance, window, max_passes, keep)
    return state, report


@torch.no_grad()
def prefill_with_states(
    model: FeedbackModel,
    prompts: TokenLists | Tensor,
    feedback_passes: FeedbackPasses = 0,
    chunk: int | None = None,
    mask: Tensor | None = None,
    keep: CacheKeep = "window",
) -> tuple[DecodeState, list[Tensor]]:
    """`prefill`, and the top states [tokens, D] of every prompt, without padding: what scores a text."""
    aligned = align_prompts(model.trunk, prompts, mask)
    if feedback_passes == "converged":
        state, states_BTD, _ = _read_converged(model, aligned, keep=keep)
        return state, [row[:length] for row, length in zip(states_BTD, aligned.lengths_B.tolist(), strict=True)]
    lanes, states = zip(*_read_chunks(model, aligned, feedback_passes, chunk, keep), strict=True)
    states_BTD, lengths = torch.cat(states, dim=1), aligned.lengths_B.tolist()
    return _prefilled(aligned, lanes[-1]), [row[len(row) - length :] for row, length in zip(states_BTD, lengths, strict=True)]


def _read_converged(
    model: FeedbackModel,
    aligned: AlignedPrompts,
    tolerance: float = 1e-3,
    window: int = WINDOW,
    max_passes: int = MAX_PASSES,
    keep: CacheKeep = "window",
) -> tuple[DecodeState, Tensor, ConvergedReport]:
    """(state, top states [B, T, D] with padding behind, report)."""
    starts = aligned.padded_behind()
    states_BTD, cache, report = read_converged(
        model, starts.tokens_BT, starts.lengths_B, tolerance, starts.positions_BT, starts.documents_BT, window, max_passes
    )
    if starts.documents_BT is not None:
        cache = cache.align_right(starts.lengths_B)
    rows_B = torch.arange(len(states_BTD), device=states_BTD.device)
    lane = Lane(cache if keep == "all" else cache.trim(), states_BTD[rows_B, starts.lengths_B - 1])
    return _prefilled(aligned, lane), states_BTD, report


def _read_chunks(
    model: FeedbackModel, aligned: AlignedPrompts, feedback_passes: FeedbackPasses, chunk: int | None, keep: CacheKeep
) -> Iterator[tuple[Lane, Tensor]]:
    """(lane of the last pass behind the chunk, its states [B, chunk, D]), chunk by chunk."""
    check_feedback_passes(feedback_passes)
    if chunk is not None and chunk < 1:
        raise ValueError(f"a chunk has at least one position, not {chunk}")
    length = aligned.tokens_BT.shape[1]
    exact = feedback_passes == "exact"
    size = 1 if exact else chunk or length
    lanes = [Lane()] * (feedback_passes + 1 if isinstance(feedback_passes, int) else 1)
    for start in range(0, length, size):
        here = slice(start, start + size)
        positions_BT, documents_BT = _part(aligned.positions_BT, here), _part(aligned.documents_BT, here)
        embeddings_BTD = model.trunk.embed(aligned.tokens_BT[:, here])
        if exact:
            lane, states_BTD = exact_step(model, lanes[0], embeddings_BTD, positions_BT, documents_BT, keep)
            lanes = [lane]
        else:
            more = start + size < length
            lanes, states_BTD = chunk_passes(model, lanes, embeddings_BTD, positions_BT, documents_BT, keep, more)
        yield lanes[-1], states_BTD


def chunk_passes(
    model: FeedbackModel,
    lanes: list[Lane],
    embeddings_BTD: Tensor,
    positions_BT: Tensor | None,
    documents_BT: Tensor | None,
    keep: CacheKeep,
    more: bool,
) -> tuple[list[Lane], Tensor]:
    """One chunk through the plain pass and every fused one. Without `more` chunks to come, only the last pass keeps its cache."""
    earlier: Keep = "window" if more else "none"
    last = len(lanes) - 1
    states_BTD, cache = model.trunk(embeddings_BTD, positions_BT, documents_BT, lanes[0].cache, earlier if last else keep)
    after = [Lane(cache, states_BTD[:, -1])]
    for k in range(1, last + 1):
        states_BTD, cache = fused_pass(
            model,
            embeddings_BTD,
            states_BTD,
            boundary_BD=lanes[k - 1].boundary_BD,  # the pass before, as it stood before this chunk
            positions_BT=positions_BT,
            documents_BT=documents_BT,
            cache=lanes[k].cache,
            keep=keep if k == last else earlier,
        )
        after.append(Lane(cache, states_BTD[:, -1]))
    return after, states_BTD


def exact_step(
    model: FeedbackModel, lane: Lane, embedding_B1D: Tensor, positions_B1: Tensor | None, documents_B1: Tensor | None, keep: CacheKeep
) -> tuple[Lane, Tensor]:
    """One position of the sequential recurrence: the lane feeds itself."""
    state_B1D, cache = fused_pass(
        model, embedding_B1D, embedding_B1D, lane.boundary_BD, positions_B1, documents_B1, cache=lane.cache, keep=keep
    )
    return Lane(cache, state_B1D[:, 0]), state_B1D


def _prefilled(aligned: AlignedPrompts, lane: Lane) -> DecodeState:
    assert lane.boundary_BD is not None
    documents_B = None if aligned.documents_BT is None else aligned.documents_BT[:, -1]
    return DecodeState(lane.cache, lane.boundary_BD, aligned.lengths_B, documents_B)


def _part(tensor_BT: Tensor | None, here: slice) -> Tensor | None:
    return None if tensor_BT is None else tensor_BT[:, here]
