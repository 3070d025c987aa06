"""Prefill: run over the prompts, return the state from which decoding goes on (section 4.2, Listing 2).

The prompt is run without feedback, then in `feedback_passes` fused passes, each of which rebuilds every key and value from position 0 on
and fuses the last prompt position too (law 6); or position by position ("exact", Eq. 8). Long prompts are run in chunks. Between chunks
each pass keeps what it needs of the past: its own cache, and its own last state, which the *next* pass is fed with at the first input of
the next chunk. So chunks and the whole are the same computation, and so are a shared prefix and what follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fullband.decode.prompts import AlignedPrompts, TokenLists, align_prompts
from fullband.feedback.by_passes import check_feedback_passes
from fullband.feedback.converged import MAX_PASSES, WINDOW, ConvergedReport, run_converged
from fullband.feedback.passes import FeedbackModel, PassOutput, PassState, below, passes_over, sequential
from fullband.feedback.state import DecodeState
from fullband.feedback_config import FeedbackPasses

CacheKeep = Literal["window", "all"]  # decoding cannot go on without a cache


@dataclass(frozen=True)
class Prefilled:
    """Where every pass stands after some positions of the prompts.

    passes   one for each pass, from the one without feedback on; a single one if exact
    exact    whether it is the sequential recurrence
    below    the cache of the layers below the entry, which all passes share
    """

    passes: tuple[PassState, ...]
    exact: bool = False
    below: Any = None

    @classmethod
    def empty(cls, feedback_passes: FeedbackPasses) -> Prefilled:
        """Raises ValueError for other `feedback_passes`, and for "converged", whose passes differ from window to window."""
        check_feedback_passes(feedback_passes)
        if feedback_passes == "converged":
            raise ValueError("'converged' settles a part of a prompt otherwise than the whole: use a number of feedback passes or 'exact'")
        exact = feedback_passes == "exact"
        return cls((PassState(),) * (1 if exact else int(feedback_passes) + 1), exact)

    def select(self, rows: Tensor) -> Prefilled:
        lower = None if self.below is None else self.below.select(rows)
        return replace(self, passes=tuple(state.select(rows) for state in self.passes), below=lower)

    def state(self, aligned: AlignedPrompts, top_BD: Tensor) -> DecodeState:
        """What decoding goes on from, where these prompts have been run whole."""
        documents_BT = aligned.layout.documents_BT
        documents_B = None if documents_BT is None else documents_BT[:, -1]
        return DecodeState(self.passes[-1], self.below, top_BD, aligned.lengths_B, documents_B)


@torch.no_grad()
def prefill(
    model: FeedbackModel,
    prompts: TokenLists | Tensor,
    feedback_passes: FeedbackPasses = 0,
    chunk: int | None = None,
    mask: Tensor | None = None,
    keep: CacheKeep = "window",
) -> DecodeState:
    """The decode state after the last token of every prompt.

    prompts          lists of ids, or a LongTensor [B, T] with `mask` [B, T] (True = token), padded on either side
    feedback_passes  0 = without feedback (Standard, Soft), k ≥ 1 = fused passes (Fused), "exact" = position by position,
                     "converged" = passes until the states stop moving
    chunk            positions run at a time (None = all); the result does not depend on it, the memory used does
    keep             "window" lets sliding layers forget what no later token can see; "all" allows the cache to be cropped

    Raises ValueError for a prompt that is empty, longer than the context or outside the vocabulary, and for other settings.
    """
    return prefill_reported(model, align_prompts(model.trunk, prompts, mask), feedback_passes, chunk, keep)[0]


@torch.no_grad()
def prefill_reported(
    model: FeedbackModel,
    aligned: AlignedPrompts,
    feedback_passes: FeedbackPasses = 0,
    chunk: int | None = None,
    keep: CacheKeep = "window",
) -> tuple[DecodeState, ConvergedReport | None]:
    """`prefill` of prompts that are aligned already, and what it took to converge where that was asked for."""
    if feedback_passes == "converged":
        state, _, report = prefill_converged(model, aligned, keep=keep)
        return state, report
    for done, outputs in run_chunks(model, aligned, Prefilled.empty(feedback_passes), chunk, keep):  # noqa: B007  (earlier ones are dropped)
        pass
    return done.state(aligned, outputs[-1].top_BTD[:, -1]), None


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
    lengths = aligned.lengths_B.tolist()
    if feedback_passes == "converged":
        state, top_BTD, _ = prefill_converged(model, aligned, keep=keep)
        return state, [row[:length] for row, length in zip(top_BTD, lengths, strict=True)]
    done, parts = zip(*run_chunks(model, aligned, Prefilled.empty(feedback_passes), chunk, keep), strict=True)
    top_BTD = torch.cat([outputs[-1].top_BTD for outputs in parts], dim=1)
    return done[-1].state(aligned, top_BTD[:, -1]), [row[len(row) - length :] for row, length in zip(top_BTD, lengths, strict=True)]


@torch.no_grad()
def prefill_converged(
    model: FeedbackModel,
    aligned: AlignedPrompts,
    tolerance: float = 1e-3,
    window: int = WINDOW,
    max_passes: int = MAX_PASSES,
    keep: CacheKeep = "window",
) -> tuple[DecodeState, Tensor, ConvergedReport]:
    """The decode state to which fused passes over the prompts converge, the top states [B, T, D] with padding on the right, and what it
    took (`run_converged`)."""
    starts = aligned.padded_right()
    inputs, lower = below(model, starts.tokens_BT, starts.layout, keep="all")
    done = run_converged(model, inputs, starts.lengths_B, tolerance, window, max_passes)
    ragged_B = None if starts.layout.documents_BT is None else starts.lengths_B
    cache, lower = (_to_decode(cache, ragged_B, keep) for cache in (done.cache, lower))
    rows_B, last_B = torch.arange(len(done.top_BTD), device=done.top_BTD.device), starts.lengths_B - 1
    fed = PassState(cache, done.states_BTD[rows_B, last_B][:, None])
    return Prefilled((fed,), below=lower).state(aligned, done.top_BTD[rows_B, last_B]), done.top_BTD, done.report


def _to_decode(cache: Any, lengths_B: Tensor | None, keep: CacheKeep) -> Any:
    """A cache with padding on the right (None = it has none), as decoding goes on from it: on the left; None stays None."""
    if cache is not None and lengths_B is not None:
        cache = cache.align_right(lengths_B)
    return cache if cache is None or keep == "all" else cache.trim()


def run_chunks(
    model: FeedbackModel,
    aligned: AlignedPrompts,
    before: Prefilled,
    chunk: int | None = None,
    keep: CacheKeep = "window",
    goes_on: bool = False,
) -> Iterator[tuple[Prefilled, list[PassOutput]]]:
    """(where every pass stands after a chunk, their outputs), chunk by chunk, from `before` on. Without anything that `goes_on` after
    these slots, only the last pass keeps its cache in the last chunk."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"a chunk must have at least one position, got {chunk}")
    length = aligned.tokens_BT.shape[1]
    size = chunk or length
    for start in range(0, length, size):
        here = slice(start, start + size)
        inputs, lower = below(model, aligned.tokens_BT[:, here], aligned.layout[:, here], before.below, keep)
        if before.exact:
            state, output = sequential(model, inputs, before.passes[0], keep)
            passes, outputs = [state], [output]
        else:
            passes, outputs = passes_over(model, inputs, before.passes, keep, more=goes_on or start + size < length)
        before = Prefilled(tuple(passes), before.exact, lower)
        yield before, outputs


@dataclass(frozen=True)
class SharedPrefix:
    """Instructions or examples that many prompts begin with, prefilled once: `tokens`, and where every pass stands after them, with all
    keys."""

    tokens: tuple[int, ...]
    prefilled: Prefilled


@torch.no_grad()
def prefill_prefix(
    model: FeedbackModel, tokens: Sequence[int], feedback_passes: FeedbackPasses = 0, chunk: int | None = None
) -> SharedPrefix:
    """Prefill a prefix for `prefill_after`. Arguments and errors are those of `prefill`.

    ValueError for "converged". There a state is committed when it moves less than a tolerance, which depends on the window it stands in; a
    window that ended with the prefix would end elsewhere in prompt and prefix run as one. So `prefill_after` could keep its promise to the
    tolerance only; "exact" keeps it to rounding.
    """
    aligned = align_prompts(model.trunk, [tokens])
    for done, _ in run_chunks(model, aligned, Prefilled.empty(feedback_passes), chunk, "all", goes_on=True):  # noqa: B007
        pass
    return SharedPrefix(tuple(tokens), done)


@torch.no_grad()
def prefill_after(
    model: FeedbackModel, prefix: SharedPrefix, continuations: TokenLists, chunk: int | None = None, keep: CacheKeep = "window"
) -> DecodeState:
    """The decode state after each continuation of the prefix: that of `prefill` of prefix and continuation as one prompt.

    continuations  lists of ids, of any lengths; each has at least one
    chunk, keep    as in `prefill`

    Raises ValueError as `prefill` does.
    """
    aligned = align_after(model, len(prefix.tokens), continuations)
    start = prefix.prefilled.select(torch.zeros_like(aligned.lengths_B))
    done, parts = zip(*run_chunks(model, aligned, start, chunk, "all"), strict=True)
    top_BTD, states_BTD = (torch.cat(whole, dim=1) for whole in zip(*(outputs[-1][:2] for outputs in parts), strict=True))
    return state_after(start, aligned, len(prefix.tokens), done[-1], top_BTD, states_BTD, keep)


def align_after(model: FeedbackModel, before: int, continuations: TokenLists) -> AlignedPrompts:
    """Continuations of `before` tokens, padded on the right. Raises ValueError as `prefill_after`."""
    aligned = align_prompts(model.trunk, continuations).padded_right()
    longest = int(aligned.lengths_B.max())
    if before + longest > model.trunk.context:
        number = int(aligned.lengths_B.argmax())
        raise ValueError(
            f"prompt {number} has {longest} tokens after a prefix of {before}; they do not fit the model's context of {model.trunk.context}"
        )
    if aligned.layout.positions_BT is None:
        return aligned
    return replace(aligned, layout=replace(aligned.layout, positions_BT=aligned.layout.positions_BT + before))


def state_after(
    start: Prefilled, aligned: AlignedPrompts, before: int, done: Prefilled, top_BTD: Tensor, states_BTD: Tensor, keep: CacheKeep
) -> DecodeState:
    """What decoding goes on from after `aligned` continuations of `before` tokens (`start`), run whole with all keys (`done`, the top
    states, the last pass's states)."""
    ragged, lengths_B = aligned.layout.documents_BT is not None, before + aligned.lengths_B
    cache, lower = (_to_decode(cache, lengths_B if ragged else None, keep) for cache in (done.passes[-1].cache, done.below))
    rows_B, last_B = torch.arange(len(lengths_B), device=lengths_B.device), aligned.lengths_B - 1
    earlier_BWD, after_BWD = start.passes[-1].before_BWD, done.passes[-1].before_BWD
    assert after_BWD is not None
    if ragged:  # where the shorter ones end, the block has not
        window = after_BWD.shape[1]
        earlier_BWD = after_BWD.new_zeros(after_BWD.shape) if earlier_BWD is None else earlier_BWD
        nearest_BW = aligned.lengths_B[:, None] + torch.arange(window, device=rows_B.device)
        after_BWD = torch.cat([earlier_BWD, states_BTD], dim=1)[rows_B[:, None], nearest_BW]
    documents_B = torch.zeros_like(lengths_B) if ragged else None
    return DecodeState(PassState(cache, after_BWD), lower, top_BTD[rows_B, last_B], lengths_B, documents_B)
