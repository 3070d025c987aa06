"""Reading ahead: tokens that are known already, in a few parallel passes instead of one step each.

Pass n makes the first n of them exact (law 2) and brings the others closer. Two uses: the soft cache of a finished text
(`rebuild_cache`, `score`), and checking a draft (`speculate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.config import FeedbackPasses
from fullband.decode.modes import Mode, resolve_mode
from fullband.decode.prefill import prefill, prefill_with_states
from fullband.decode.sampling import precise
from fullband.feedback.passes import FeedbackModel, check_length, fused_pass
from fullband.feedback.state import DecodeState
from fullband.trunk.pointwise import lengths


@dataclass(frozen=True)
class Ahead:
    """S tokens read behind a decode state.

    states_BSD   their top states
    change_BS    relative change of each state in the last pass; 0 where it is exact, infinite where there was one pass only
    cache        the state's cache with their keys and values behind it, none forgotten
    """

    states_BSD: Tensor
    change_BS: Tensor
    cache: Any


@torch.no_grad()
def read_ahead(model: FeedbackModel, state: DecodeState, tokens_BS: Tensor, mode: Mode) -> Iterator[Ahead]:
    """The tokens [B, S] behind `state` after 1, 2, 3, … passes; ends when all are exact (in standard mode at once).

    The first token is fused with the state's top state, so it is exact from the first pass on; the others enter plain. Only the newest
    `Ahead` is valid: its cache takes the place of the one before.
    """
    embeddings_BSD = model.trunk.embed(tokens_BS)
    size = tokens_BS.shape[1]
    offsets_S = torch.arange(size, device=tokens_BS.device)
    positions_BS = None if state.documents_B is None else state.positions_B[:, None] + offsets_S
    documents_BS = None if state.documents_B is None else state.documents_B[:, None].expand(tokens_BS.shape)
    if not mode.feeds_back:
        states, cache = model.trunk(embeddings_BSD, positions_BS, documents_BS, state.cache, "all")
        yield Ahead(states, torch.zeros_like(states[..., 0]), cache)
        return
    length = state.cache.length
    previous, cache = embeddings_BSD, state.cache
    plain_1S = offsets_S[None] > 0
    change = torch.full(tokens_BS.shape, float("inf"), dtype=embeddings_BSD.dtype, device=tokens_BS.device)
    for exact in range(1, size + 1):
        assert cache is not None
        states, cache = fused_pass(
            model,
            embeddings_BSD,
            previous,
            state.top_BD,
            positions_BS,
            documents_BS,
            cache=cache.rollback(length),
            keep="all",
            plain_BT=plain_1S if exact == 1 else None,
        )
        if exact > 1:
            change = lengths(states - previous) / lengths(states)
        yield Ahead(states, change.masked_fill(offsets_S < exact, 0), cache)
        previous = states


@dataclass(frozen=True)
class Rebuilt:
    """A text that was read as if it had been generated.

    state        decode state behind its last token
    states       top states [tokens, D] of every row's text
    residual_B   largest relative change of a state in the last pass: how far the parallel passes still were from the exact states
    """

    state: DecodeState
    states: list[Tensor]
    residual_B: Tensor


@torch.no_grad()
def rebuild_cache(
    model: FeedbackModel,
    prompt: Sequence[int],
    continuation: Sequence[int],
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    passes: int | None = None,
) -> Rebuilt:
    """The cache that decoding `continuation` behind `prompt` would have left, in parallel passes over the continuation.

    passes                  None (the default) = as many as make it exact, one a token at most: less only where the states do not change
                            any more. A number is faster, and as far off as `residual_B` says: on a model that does not settle, by far
    mode, feedback_passes   how the prompt is read and the continuation was generated (`resolve_mode`)
    Raises ValueError for a bad prompt, an empty continuation, fewer than one pass, or a text longer than the context.
    """
    if passes is not None and passes < 1:
        raise ValueError(f"rebuilding a cache takes at least 1 pass, not {passes}")
    if not len(continuation):
        raise ValueError("there is no continuation to read")
    check_length(model, len(prompt) + len(continuation))
    resolved = resolve_mode(mode, feedback_passes)
    before, prompt_states = prefill_with_states(model, [list(prompt)], resolved.feedback_passes)
    tokens_1S = torch.tensor([list(continuation)], device=before.top_BD.device)
    for number, ahead in enumerate(read_ahead(model, before, tokens_1S, resolved), start=1):
        if number == passes or not bool(ahead.change_BS.any()):
            break
    state = DecodeState(ahead.cache.trim(), ahead.states_BSD[:, -1], before.positions_B + len(continuation), before.documents_B)
    return Rebuilt(state, [torch.cat([prompt_states[0], ahead.states_BSD[0]])], ahead.change_BS.amax(dim=1))


@torch.no_grad()
def score(
    model: FeedbackModel,
    prompt: Sequence[int],
    continuation: Sequence[int],
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    passes: int | None = None,
) -> tuple[Tensor, float]:
    """(log-probability [S] of every token of `continuation` as the mode would have generated it, residual of the passes).

    Arguments and errors are those of `rebuild_cache`; the residual says how exact they are (0 = exactly).
    """
    resolved = resolve_mode(mode, feedback_passes)
    if len(continuation) == 1:
        top_SD, residual = prefill(model, [list(prompt)], resolved.feedback_passes).top_BD, 0.0
    else:
        rebuilt = rebuild_cache(model, prompt, continuation[:-1], mode, feedback_passes, passes)
        top_SD, residual = rebuilt.states[0][len(prompt) - 1 :], float(rebuilt.residual_B)
    log_probabilities = precise(F.linear(top_SD, model.trunk.head_weight)).log_softmax(dim=-1)
    targets_S = torch.tensor(list(continuation), device=top_SD.device)
    return log_probabilities.gather(1, targets_S[:, None])[:, 0], residual
