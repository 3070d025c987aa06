"""Passes: shift the top states by one, fuse, run the trunk (Eqs. 9-11). `fused_pass` is the only place that does it;
training, prefill, decoding and diagnostics all go through it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from fullband.config import FeedbackPasses
from fullband.feedback.fusion import Fusion
from fullband.trunk.protocol import Keep, Trunk


class FeedbackModel(Protocol):
    """What feedback needs: a trunk and a fusion."""

    @property
    def trunk(self) -> Trunk: ...

    @property
    def fusion(self) -> Fusion: ...


def fused_pass(
    model: FeedbackModel,
    embeddings_BTD: Tensor,
    previous_BTD: Tensor,
    boundary_BD: Tensor | None = None,
    positions_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
    cache: Any | None = None,
    keep: Keep = "none",
    plain_BT: Tensor | None = None,
    noise_BTD: Tensor | None = None,
) -> tuple[Tensor, Any | None]:
    """One pass over T positions: shift `previous_BTD` right by one, fuse with the embeddings, run the trunk.

    previous_BTD   states of these positions in the previous pass (its last one is not read); for T = 1 anything of that shape
    boundary_BD    state of the position just before the first one; None where the rows begin here
    positions_BT   0 marks the start of a document, always plain; None = the slots after the cache, one document a row
    plain_BT       True where the input stays the plain embedding (prefix mixin)
    noise_BTD      jitter added to the carried states (Eq. 13)
    Returns (top states [B, T, D], cache or None). Raises ValueError for documents without positions: nothing would say where they start.
    """
    if documents_BT is not None and positions_BT is None:
        raise ValueError("documents_BT needs positions_BT: position 0 marks the start of each document, where nothing is fed back")
    behind = slice(-embeddings_BTD.shape[-1], None)  # all of the state, or the part behind the top state (`Trunk.forward`)
    first_BD = torch.zeros_like(previous_BTD[:, 0, behind]) if boundary_BD is None else boundary_BD[..., behind]
    carried = torch.cat([first_BD[:, None], previous_BTD[:, :-1, behind]], dim=1)
    if noise_BTD is not None:
        carried = carried + noise_BTD[..., behind]
    inputs = model.fusion(embeddings_BTD, carried, model.trunk.input_norm)
    plain = _plain_positions(embeddings_BTD, boundary_BD, positions_BT, plain_BT)
    if plain is not None:
        inputs = torch.where(plain[..., None], embeddings_BTD.to(inputs.dtype), inputs)
    return model.trunk(inputs, positions_BT, documents_BT, cache, keep)


def _plain_positions(embeddings: Tensor, boundary: Tensor | None, positions: Tensor | None, plain: Tensor | None) -> Tensor | None:
    """Where the input stays plain, [B or 1, T]: document starts, the prefix, and the first slot of rows that begin here."""
    starts = None if positions is None else positions == 0
    if boundary is None:
        first = torch.arange(embeddings.shape[1], device=embeddings.device)[None] == 0
        starts = first if starts is None else starts | first
    return starts if plain is None else plain if starts is None else starts | plain


def iterate_passes(
    model: FeedbackModel,
    tokens_BT: Tensor,
    positions_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
    plain_BT: Tensor | None = None,
) -> Iterator[Tensor]:
    """States [B, T, D] of pass 1 (plain), 2, 3, … without end, in constant memory.

    plain_BT   where all passes stay plain (prompts); slots before the first that any row feeds back are computed once
    """
    embeddings = model.trunk.embed(tokens_BT)
    head, cache = _read_plain_head(model, embeddings, positions_BT, documents_BT, plain_BT)
    behind = slice(0 if head is None else head.shape[1], None)
    boundary = None if head is None else head[:, -1]
    positions, documents, plain = (None if rows is None else rows[:, behind] for rows in (positions_BT, documents_BT, plain_BT))
    states, _ = model.trunk(embeddings[:, behind], positions, documents, cache)
    while True:
        yield states if head is None else torch.cat([head, states], dim=1)
        states, _ = fused_pass(model, embeddings[:, behind], states, boundary, positions, documents, cache, plain_BT=plain)


def _read_plain_head(
    model: FeedbackModel, embeddings_BTD: Tensor, positions_BT: Tensor | None, documents_BT: Tensor | None, plain_BT: Tensor | None
) -> tuple[Tensor | None, Any | None]:
    """(top states [B, n, D] of the n first slots, plain in every row, and their cache), or nothing where there are none. The last slot
    is left to the passes, as are all of a trunk that cannot give a cache now."""
    if plain_BT is None or not model.trunk.reuses:
        return None, None
    length = min(int(plain_BT.all(dim=0).long().cumprod(dim=0).sum()), plain_BT.shape[1] - 1)
    if length == 0:
        return None, None
    positions, documents = (None if rows is None else rows[:, :length] for rows in (positions_BT, documents_BT))
    return model.trunk(embeddings_BTD[:, :length], positions, documents, keep="window")


def read(
    model: FeedbackModel,
    tokens_BT: Tensor,
    feedback_passes: FeedbackPasses = 0,
    positions_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
    plain_BT: Tensor | None = None,
) -> Tensor:
    """Top states [B, T, D] of whole rows after 0, 1, 2, … feedback passes, read position by position ("exact", Eq. 8), or refined until
    they stop moving ("converged", to 1e-3; `read_converged` has the options).

    plain_BT   True where nothing is fed back: the prompts, which Soft reads plainly
    Raises ValueError for any other `feedback_passes`, for rows longer than the context, and for "converged" with `plain_BT`.
    """
    check_length(model, tokens_BT.shape[1])
    check_feedback_passes(feedback_passes)
    if feedback_passes == "exact":
        return read_exact(model, tokens_BT, positions_BT, documents_BT, plain_BT)
    if feedback_passes == "converged":
        if plain_BT is not None:
            raise ValueError("feedback_passes 'converged' reads whole rows fused; rows with plain prompts take 0, 1, 2, … or 'exact'")
        from fullband.feedback.converged import read_converged  # it is written with fused_pass, so it comes after this module

        return read_converged(model, tokens_BT, positions_BT=positions_BT, documents_BT=documents_BT)[0]
    for done, states in enumerate(iterate_passes(model, tokens_BT, positions_BT, documents_BT, plain_BT)):
        if done == feedback_passes:
            return states
    raise AssertionError("iterate_passes does not end")


def read_exact(
    model: FeedbackModel,
    tokens_BT: Tensor,
    positions_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
    plain_BT: Tensor | None = None,
) -> Tensor:
    """Top states [B, T, D] of the sequential recurrence (Eq. 8): each position waits for the one before it. What is plain in every row
    before the first that is not is read at once."""
    embeddings = model.trunk.embed(tokens_BT)
    head, cache = _read_plain_head(model, embeddings, positions_BT, documents_BT, plain_BT)
    states = [] if head is None else [head]
    for t in range(0 if head is None else head.shape[1], tokens_BT.shape[1]):
        here = slice(t, t + 1)
        positions, documents, plain = (None if rows is None else rows[:, here] for rows in (positions_BT, documents_BT, plain_BT))
        token = embeddings[:, here]
        state, cache = fused_pass(model, token, token, states[-1][:, -1] if states else None, positions, documents, cache, "window", plain)
        states.append(state)
    return torch.cat(states, dim=1)


def check_length(model: FeedbackModel, length: int) -> None:
    """Raises ValueError if a row of `length` tokens does not fit the trunk's context."""
    if length > model.trunk.context:
        raise ValueError(f"{length} tokens do not fit the model's context of {model.trunk.context}{model.trunk.context_note}")


def check_feedback_passes(feedback_passes: FeedbackPasses) -> None:
    """Raises ValueError unless it is 0, 1, 2, …, "exact" or "converged"."""
    if feedback_passes not in ("exact", "converged") and (not isinstance(feedback_passes, int) or feedback_passes < 0):
        raise ValueError(f"feedback_passes is 0, 1, 2, …, 'exact' or 'converged', not {feedback_passes!r}")
