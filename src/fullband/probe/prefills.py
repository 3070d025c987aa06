"""The examples, prefilled in each mode, up to the final colon and through it.

standard   every token enters as its plain embedding
k          only the final k tokens are recurrent: each is fused with the top state before it, after a prefix without feedback (App. F)
full       every token is recurrent, from the start: the sequential recurrence (Eq. 8)

One pass without feedback over the prefix serves standard and every k. What is left for the end is one token, the colon, so looking at its
residual stream, and changing it, costs one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.feedback.passes import FeedbackModel, PassState, below, sequential
from fullband.trunk.residual import residuals, watched

START = PassState()
STANDARD, FULL = "standard", "full"
PREFILLS = (STANDARD, "1", "2", "4", FULL)
PROBED_SUFFIXES = (1, 2, 4)


@dataclass(frozen=True)
class Known:
    """What rows know of the tokens so far: the caches below and above the entry, what the next token is fed with, and the last top state
    [B, D]; nothing at the start."""

    fed: PassState = START
    below: Any = None
    top_BD: Tensor | None = None


@dataclass(frozen=True)
class Colon:
    """Rows that have run over everything but their final token: `known` is what they know, `token_B` that token."""

    known: Known
    token_B: Tensor
    recurrent: bool


@dataclass(frozen=True)
class Answers:
    """Tokens that both answers begin with, and the two tokens [2] that tell them apart."""

    shared: Sequence[int]
    telling: tuple[int, int]


def before_colon(model: FeedbackModel, tokens_BT: Tensor, prefills: Sequence[str], steps: Mapping[int, int]) -> Iterator[tuple[str, Colon]]:
    """For each way of prefilling, rows [B, T] run up to their final token. `steps` says how many tokens the suffix of k covers."""
    recurrent = {name: steps[int(name)] for name in prefills if name not in (STANDARD, FULL)}
    length = tokens_BT.shape[1]
    last_B = tokens_BT[:, -1]
    if STANDARD in prefills or recurrent:
        start = length - max([1, *recurrent.values()])
        prefix = extend(model, Known(), tokens_BT[:, :start], recurrent=False)
        if STANDARD in prefills:
            yield STANDARD, Colon(extend(model, prefix, tokens_BT[:, start:-1], recurrent=False), last_B, False)
        for name, n in recurrent.items():
            known = extend(model, prefix, tokens_BT[:, start : length - n], recurrent=False)
            yield name, Colon(extend(model, known, tokens_BT[:, length - n : -1], recurrent=True), last_B, True)
    if FULL in prefills:
        yield FULL, Colon(extend(model, Known(), tokens_BT[:, :-1], recurrent=True), last_B, True)


def extend(model: FeedbackModel, known: Known, tokens_BT: Tensor, recurrent: bool) -> Known:
    """What rows know after these tokens, run at once as plain embeddings, or each fused with the state before it. T may be 0."""
    if not tokens_BT.shape[1]:
        return known
    inputs, lower = below(model, tokens_BT, cache=known.below, keep="window")
    fed, output = sequential(model, inputs, known.fed, feeds_back=recurrent)
    return Known(fed, lower, output.top_BTD[:, -1])


def through_colon(model: FeedbackModel, colon: Colon) -> Known:
    return extend(model, colon.known, colon.token_B[:, None], colon.recurrent)


def colon_residuals(model: FeedbackModel, colon: Colon) -> tuple[Tensor, Known]:
    """The residual stream [depths, B, D] of the final token, and what is known after it."""
    with residuals(model.trunk) as seen:
        known = through_colon(model, colon)
    return torch.stack([streams[0][:, -1] for streams in seen]), known


def embedding_only(model: FeedbackModel, colon: Colon, before_B: Tensor) -> Tensor:
    """What enters [B, D] at the colon with nothing processed in it: where it would carry the state of the token before it, `before_B`, it
    carries that token's embedding."""
    inputs, _ = below(model, colon.token_B[:, None], cache=colon.known.below)
    if not colon.recurrent:
        return inputs.x_BTD[:, 0]
    return model.connection.merge(inputs.x_BTD, model.trunk.below(before_B[:, None]).x_BTD, model.trunk)[:, 0]


def margins(model: FeedbackModel, known: Known, answers: Answers, recurrent: bool) -> Tensor:
    """[B], how much likelier (nats) the second answer is than the first, after the colon."""
    for token in answers.shared:
        known = extend(model, known, torch.full_like(_top(known)[:, :1], token, dtype=torch.long), recurrent)
    logits_B2 = F.linear(_top(known), model.trunk.head_weight[list(answers.telling)]).float()
    return logits_B2[:, 1] - logits_B2[:, 0]


def patched_margins(model: FeedbackModel, colon: Colon, residual_BD: Tensor, depth: int, answers: Answers) -> Tensor:
    """`margins` where every row's residual stream at the colon is, at `depth`, its partner's: rows 2i and 2i + 1 are partners.

    At depth 0 of a recurrent prefill this is swapping the carried top states, as the colon itself is the same.
    """
    partners = torch.arange(len(residual_BD), device=residual_BD.device) ^ 1
    swapped_B1D = residual_BD[partners][:, None]
    with watched(model.trunk, depth, lambda residual_B1D: swapped_B1D.to(residual_B1D.dtype)):
        known = through_colon(model, colon)
    return margins(model, known, answers, colon.recurrent)


def _top(known: Known) -> Tensor:
    """The last top state [B, D] of rows that have run over something."""
    assert known.top_BD is not None
    return known.top_BD
