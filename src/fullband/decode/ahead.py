"""Running ahead: tokens that are known already, in a few parallel passes instead of one step each.

Pass n makes the first n of them exact (law 2) and brings the others closer. Two uses: the soft cache of a finished text
(`rebuild_cache`), and checking a draft (`speculate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fullband.decode.modes import Mode, resolve_mode
from fullband.decode.prefill import prefill_with_states
from fullband.feedback.connection import Connection
from fullband.feedback.passes import FeedbackModel, Pass, PassState, below, check_length, fused_pass, parallel, plain_pass
from fullband.feedback.state import DecodeState
from fullband.feedback_config import FeedbackPasses
from fullband.trunk.pointwise import lengths as vector_lengths


@dataclass(frozen=True)
class Ahead:
    """S tokens run after a decode state.

    top_BSD       their top states
    states_BSD    the states that are carried on
    change_BS     relative change of each carried state in the last pass; 0 where it is exact, infinite where there was one pass only
    cache, below  the state's caches with their keys and values after it, none forgotten
    """

    top_BSD: Tensor
    states_BSD: Tensor
    change_BS: Tensor
    cache: Any
    below: Any

    def state_after(self, before: DecodeState, tokens: int, connection: Connection) -> DecodeState:
        """The decode state after the first `tokens` of them."""
        length = before.cache.length + tokens
        fed = PassState(self.cache.crop(length), connection.roll(before.fed.before_BWD, self.states_BSD[:, :tokens]))
        lower = None if self.below is None else self.below.crop(length)
        return DecodeState(fed, lower, self.top_BSD[:, tokens - 1], before.positions_B + tokens, before.documents_B)


@torch.no_grad()
def run_ahead(model: FeedbackModel, state: DecodeState, tokens_BS: Tensor, mode: Mode) -> Iterator[Ahead]:
    """The tokens [B, S] after `state`, in 1, 2, 3, … passes; ends when all are exact (in standard mode at once).

    The first token is fed with the state's own, so it is exact from the first pass on; the others enter without feedback. Only the newest
    `Ahead` is valid: its cache takes the place of the one before.
    """
    size, device = tokens_BS.shape[1], tokens_BS.device
    inputs, lower = below(model, tokens_BS, state.layout(size), state.below, "all")
    if not mode.feeds_back:
        output = plain_pass(model, inputs, state.cache, "all")
        yield Ahead(*output[:2], torch.zeros_like(output.states_BTD[..., 0]), output.cache, lower)
        return
    offsets_S, length = torch.arange(size, device=device), state.cache.length
    alone = replace(inputs, layout=inputs.layout.with_plain(offsets_S[None] > 0))
    output = fused_pass(model, alone, inputs.x_BTD, state.fed.before_BWD, state.cache, "all")
    change_BS = torch.full(tokens_BS.shape, float("inf"), dtype=output.states_BTD.dtype, device=device)
    yield Ahead(*output[:2], change_BS.masked_fill(offsets_S < 1, 0), output.cache, lower)
    passes = (Pass(0, state.fed.before_BWD, output.cache.rollback(length), "all") for _ in range(size - 1))
    for exact, latest in enumerate(parallel(model, inputs, output, passes), start=2):
        change_BS = vector_lengths(latest.states_BTD - output.states_BTD) / vector_lengths(latest.states_BTD)
        output = latest  # the next pass rolls this one's cache back
        yield Ahead(*output[:2], change_BS.masked_fill(offsets_S < exact, 0), output.cache, lower)


@dataclass(frozen=True)
class Rebuilt:
    """A text as if it had been generated.

    state        decode state after its last token
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
    """The cache that decoding `continuation` after `prompt` would have left, in parallel passes over the continuation.

    passes                  None (the default) = as many as make it exact, one a token at most: less only where the states do not change
                            any more. A number is faster, and as far off as `residual_B` says: on a model that does not settle, by far
    mode, feedback_passes   how the prompt is prefilled and the continuation was generated (`resolve_mode`)
    Raises ValueError for a bad prompt, an empty continuation, fewer than one pass, or a text longer than the context.
    """
    if passes is not None and passes < 1:
        raise ValueError(f"rebuilding a cache takes at least 1 pass, not {passes}")
    if not len(continuation):
        raise ValueError("the continuation is empty")
    check_length(model, len(prompt) + len(continuation))
    resolved = resolve_mode(mode, feedback_passes)
    before, prompt_states = prefill_with_states(model, [list(prompt)], resolved.feedback_passes)
    tokens_1S = torch.tensor([list(continuation)], device=before.top_BD.device)
    for number, ahead in enumerate(run_ahead(model, before, tokens_1S, resolved), start=1):
        if number == passes or not bool(ahead.change_BS.any()):
            break
    state = ahead.state_after(before, len(continuation), model.connection).trim()
    return Rebuilt(state, [torch.cat([prompt_states[0], ahead.top_BSD[0]])], ahead.change_BS.amax(dim=1))
