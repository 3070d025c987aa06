"""Reading the examples in each way of prefilling, up to the final colon and through it.

standard   every token enters as its plain embedding
k          only the final k tokens are recurrent: each is fused with the top state before it, behind a plain prefix (App. F)
full       every token is recurrent, from the start: the sequential recurrence (Eq. 8)

One plain reading of the prefix serves standard and every k. What is left for the end is one token, the colon, so looking at its residual
stream, and changing it, costs one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.decode.prefill import Lane, chunk_passes, exact_step
from fullband.feedback.passes import FeedbackModel
from fullband.trunk.residual import residuals, watched

STANDARD, FULL = "standard", "full"
PREFILLS = (STANDARD, "1", "2", "4", FULL)
PROBED_SUFFIXES = (1, 2, 4)


@dataclass(frozen=True)
class Colon:
    """Rows that have read everything but their final token: `lane` is what they know, `token_B` that token."""

    lane: Lane
    token_B: Tensor
    recurrent: bool


@dataclass(frozen=True)
class Answers:
    """Tokens that both answers begin with, and the two tokens [2] that tell them apart."""

    shared: Sequence[int]
    telling: tuple[int, int]


def before_colon(model: FeedbackModel, tokens_BT: Tensor, prefills: Sequence[str], steps: Mapping[int, int]) -> Iterator[tuple[str, Colon]]:
    """For each way of prefilling, rows [B, T] read up to their final token. `steps` says how many tokens the suffix of k covers."""
    recurrent = {name: steps[int(name)] for name in prefills if name not in (STANDARD, FULL)}
    length = tokens_BT.shape[1]
    last_B = tokens_BT[:, -1]
    if STANDARD in prefills or recurrent:
        start = length - max([1, *recurrent.values()])
        prefix = read_plain(model, Lane(), tokens_BT[:, :start])
        if STANDARD in prefills:
            yield STANDARD, Colon(read_plain(model, prefix, tokens_BT[:, start:-1]), last_B, False)
        for name, n in recurrent.items():
            lane = read_plain(model, prefix, tokens_BT[:, start : length - n])
            yield name, Colon(read_recurrent(model, lane, tokens_BT[:, length - n : -1]), last_B, True)
    if FULL in prefills:
        yield FULL, Colon(read_recurrent(model, Lane(), tokens_BT[:, :-1]), last_B, True)


def read_plain(model: FeedbackModel, lane: Lane, tokens_BT: Tensor) -> Lane:
    """The lane behind these tokens, read at once as plain embeddings. T may be 0."""
    if not tokens_BT.shape[1]:
        return lane
    lanes, _ = chunk_passes(model, [lane], model.trunk.embed(tokens_BT), None, None, "window", more=True)
    return lanes[0]


def read_recurrent(model: FeedbackModel, lane: Lane, tokens_BT: Tensor) -> Lane:
    """The lane behind these tokens, each fused with the top state before it. T may be 0."""
    for t in range(tokens_BT.shape[1]):
        embedding_B1D = model.trunk.embed(tokens_BT[:, t : t + 1])
        lane, _ = exact_step(model, lane, embedding_B1D, None, None, "window")
    return lane


def read_colon(model: FeedbackModel, colon: Colon) -> Lane:
    read = read_recurrent if colon.recurrent else read_plain
    return read(model, colon.lane, colon.token_B[:, None])


def colon_residuals(model: FeedbackModel, colon: Colon) -> tuple[Tensor, Lane]:
    """The residual stream [depths, B, D] of the final token, and the lane behind it."""
    with residuals(model.trunk) as seen:
        lane = read_colon(model, colon)
    return torch.stack([streams[0][:, -1] for streams in seen]), lane


def embedding_only(model: FeedbackModel, colon: Colon, before_B: Tensor) -> Tensor:
    """The stack's input [B, D] at the colon with nothing processed in it: where it would carry the top state of the token before
    it, `before_B`, it carries that token's embedding."""
    embedding_B1D = model.trunk.embed(colon.token_B[:, None])
    if not colon.recurrent:
        return embedding_B1D[:, 0]
    return model.fusion(embedding_B1D, model.trunk.embed(before_B[:, None]), model.trunk.input_norm)[:, 0]


def margins(model: FeedbackModel, lane: Lane, answers: Answers, recurrent: bool) -> Tensor:
    """[B], how much likelier (nats) the second answer is than the first, behind the colon."""
    read = read_recurrent if recurrent else read_plain
    for token in answers.shared:
        lane = read(model, lane, torch.full_like(_top(lane)[:, :1], token, dtype=torch.long))
    logits_B2 = F.linear(_top(lane), model.trunk.head_weight[list(answers.telling)]).float()
    return logits_B2[:, 1] - logits_B2[:, 0]


def patched_margins(model: FeedbackModel, colon: Colon, residual_BD: Tensor, depth: int, answers: Answers) -> Tensor:
    """`margins` where every row's residual stream at the colon is, at `depth`, its partner's: rows 2i and 2i + 1 are partners.

    At depth 0 of a recurrent prefill this is swapping the carried top states, as the colon itself is the same.
    """
    partners = torch.arange(len(residual_BD), device=residual_BD.device) ^ 1
    swapped_B1D = residual_BD[partners][:, None]
    with watched(model.trunk, depth, lambda residual_B1D: swapped_B1D.to(residual_B1D.dtype)):
        lane = read_colon(model, colon)
    return margins(model, lane, answers, colon.recurrent)


def _top(lane: Lane) -> Tensor:
    """The last top state [B, D] of rows that have read something."""
    assert lane.boundary_BD is not None
    return lane.boundary_BD
