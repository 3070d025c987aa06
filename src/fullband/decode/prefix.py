"""A shared prefix: instructions or examples that many prompts begin with, read once.

What follows a prefix continues each of its passes, so a pass needs its own cache and its own last state; these are kept. Reading the
prefix and then a continuation is the same computation as reading a prompt in two chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullband.config import FeedbackPasses
from fullband.decode.prefill import CacheKeep, Lane, chunk_passes, exact_step
from fullband.decode.prompts import AlignedPrompts, TokenLists, align_prompts
from fullband.feedback.passes import FeedbackModel, check_feedback_passes
from fullband.feedback.state import DecodeState


@dataclass(frozen=True)
class Prefix:
    """One text that has been read.

    tokens           its ids
    feedback_passes  how it was read; continuations are read alike
    lanes            of every pass (one if exact) its cache, with all keys, and its last state [1, D]
    """

    tokens: tuple[int, ...]
    feedback_passes: FeedbackPasses
    lanes: tuple[Lane, ...]


@torch.no_grad()
def read_prefix(model: FeedbackModel, tokens: Sequence[int], feedback_passes: FeedbackPasses = 0, chunk: int | None = None) -> Prefix:
    """Read a prefix for `prefill_after`. Arguments and errors are those of `prefill`.

    ValueError for "converged". There a state is committed when it moves less than a tolerance, which depends on the window it stands in; a
    window that ended with the prefix would end elsewhere in prompt and prefix read as one. So `prefill_after` could keep its promise to the
    tolerance only; "exact" keeps it to rounding.
    """
    check_feedback_passes(feedback_passes)
    if feedback_passes == "converged":
        raise ValueError(
            "read a prefix in a number of feedback passes or 'exact': 'converged' would settle it otherwise than a whole prompt"
        )
    empty = [Lane()] * (feedback_passes + 1 if isinstance(feedback_passes, int) else 1)
    aligned = align_prompts(model.trunk, [tokens])
    lanes, _ = read_on(model, aligned, empty, feedback_passes == "exact", chunk)
    return Prefix(tuple(tokens), feedback_passes, tuple(lanes))


@torch.no_grad()
def prefill_after(
    model: FeedbackModel, prefix: Prefix, continuations: TokenLists, chunk: int | None = None, keep: CacheKeep = "window"
) -> DecodeState:
    """The decode state behind each continuation of the prefix: that of `prefill` of prefix and continuation as one prompt.

    continuations  lists of ids, of any lengths; each has at least one
    chunk, keep    as in `prefill`

    Raises ValueError as `prefill` does.
    """
    aligned = align_prompts(model.trunk, continuations).padded_behind()
    before, longest = len(prefix.tokens), int(aligned.lengths_B.max())
    if before + longest > model.trunk.context:
        number = int(aligned.lengths_B.argmax())
        raise ValueError(
            f"prompt {number} has {longest} tokens after a prefix of {before}; they do not fit the model's context of {model.trunk.context}"
        )
    if aligned.positions_BT is not None:
        aligned = replace(aligned, positions_BT=aligned.positions_BT + before)
    rows = len(aligned.tokens_BT)
    lanes = [_repeated(lane, rows) for lane in prefix.lanes]
    lanes, states_BTD = read_on(model, aligned, lanes, prefix.feedback_passes == "exact", chunk)
    cache, lengths_B = lanes[-1].cache, before + aligned.lengths_B
    assert cache is not None
    if aligned.documents_BT is not None:
        cache = cache.align_right(lengths_B)
    top_BD = states_BTD[torch.arange(rows, device=lengths_B.device), aligned.lengths_B - 1]
    documents_B = None if aligned.documents_BT is None else torch.zeros_like(lengths_B)
    return DecodeState(cache if keep == "all" else cache.trim(), top_BD, lengths_B, documents_B)


def read_on(
    model: FeedbackModel, aligned: AlignedPrompts, lanes: list[Lane], exact: bool, chunk: int | None, keep: CacheKeep = "all"
) -> tuple[list[Lane], Tensor]:
    """(the lanes behind these slots, which follow those that `lanes` have read; the last one's states [B, T, D])."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"a chunk has at least one position, not {chunk}")
    states = []
    for here in torch.arange(aligned.tokens_BT.shape[1]).split(1 if exact else chunk or aligned.tokens_BT.shape[1]):
        part = slice(int(here[0]), int(here[-1]) + 1)
        positions_BT = None if aligned.positions_BT is None else aligned.positions_BT[:, part]
        documents_BT = None if aligned.documents_BT is None else aligned.documents_BT[:, part]
        embeddings_BTD = model.trunk.embed(aligned.tokens_BT[:, part])
        if exact:
            lane, states_BTD = exact_step(model, lanes[0], embeddings_BTD, positions_BT, documents_BT, keep)
            lanes = [lane]
        else:
            lanes, states_BTD = chunk_passes(model, lanes, embeddings_BTD, positions_BT, documents_BT, keep, more=True)
        states.append(states_BTD)
    return lanes, torch.cat(states, dim=1)


def _repeated(lane: Lane, rows: int) -> Lane:
    assert lane.cache is not None and lane.boundary_BD is not None
    return Lane(lane.cache.repeat(rows), lane.boundary_BD.expand(rows, -1))
