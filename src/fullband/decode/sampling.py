"""Logits to tokens. A row's random numbers are a function of (seed, its key, step): neighbours and batch size do not matter.

The order is that of transformers: repetition penalty, minimum length, logit processors, then temperature, top-k, top-p, min-p, each on
what the one before it left. At temperature 0 the most likely token is taken, which the last four can't change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_STREAM = 0x73616D70  # keeps these streams apart from those of training with the same seed
_MOST_LIKELY = 1024  # tokens that usually hold the whole nucleus of top-p
NO_TOKEN = -1  # in the slots before a shorter row


@dataclass(frozen=True)
class TextSoFar:
    """What a logit processor knows of the rows whose logits it is given.

    rows_N     their numbers: sample s of prompt i is row i·n + s
    tokens_NT  prompt and new tokens, aligned at the end; -1 before a shorter row. Not to be written to
    made       new tokens of each row so far
    """

    rows_N: Tensor
    tokens_NT: Tensor
    made: int


class History:
    """Tokens [N, T] and, where asked for, which of the vocabulary have occurred [N, V]. A step is one write, whatever N and T."""

    def __init__(self, tokens_NT: Tensor, room: int, vocab_size: int | None = None):
        """The prompts (-1 = padding at the left) with space for `room` more tokens; `vocab_size` None = no record of what occurred."""
        rows, self._length = tokens_NT.shape
        self._buffer = torch.nn.functional.pad(tokens_NT, (0, room), value=NO_TOKEN)
        self.seen_NV: Tensor | None = None
        if vocab_size is not None:
            seen = torch.zeros(rows, vocab_size + 1, dtype=torch.bool, device=tokens_NT.device)  # the last column takes the padding
            seen.scatter_(1, tokens_NT.where(tokens_NT >= 0, vocab_size), True)
            self.seen_NV = seen[:, :-1].contiguous()

    @property
    def tokens_NT(self) -> Tensor:
        return self._buffer[:, : self._length]

    def append(self, tokens_N: Tensor) -> None:
        self._buffer[:, self._length] = tokens_N
        self._length += 1
        if self.seen_NV is not None:
            self.seen_NV.scatter_(1, tokens_N[:, None], True)

    def select(self, rows_N: Tensor) -> None:
        """Only the given rows stay."""
        self._buffer = self._buffer[rows_N]
        self.seen_NV = None if self.seen_NV is None else self.seen_NV[rows_N]


LogitProcessor = Callable[[Tensor, TextSoFar], Tensor]  # logits [N, V] of the rows still in the batch -> logits [N, V]


def check(*requirements: tuple[bool, str]) -> None:
    """Raises ValueError for the first that does not hold, with what it says."""
    for holds, message in requirements:
        if not holds:
            raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a token is drawn.

    temperature         divides the logits; 0 = the most likely token
    top_k               only the k most likely tokens, and those as likely as the k-th; None = all
    top_p               only the most likely tokens that together have this probability, and those as likely as the last of them; 1 = all
    min_p               only tokens with at least this share of the most likely one's probability; 0 = all
    repetition_penalty  tokens of the prompt and the new text: logits above 0 are divided by it, others multiplied; 1 = none
    min_new_tokens      tokens a row makes at least: no stop id before them, and no stop string begins in the text before them
    processors          functions (logits [N, V], TextSoFar) -> logits [N, V], applied one after the other
    seed                of the draws

    Raises ValueError for a value that means nothing.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    processors: Sequence[LogitProcessor] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            (math.isfinite(self.temperature) and self.temperature >= 0, f"temperature is a number ≥ 0, not {self.temperature}"),
            (self.top_k is None or self.top_k >= 1, f"top_k keeps at least 1 token, not {self.top_k} (None = all)"),
            (0 < self.top_p <= 1, f"top_p is a probability above 0 and up to 1, not {self.top_p}"),
            (0 <= self.min_p < 1, f"min_p is at least 0 and below 1, not {self.min_p}"),
            (
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                f"repetition_penalty is a number above 0, not {self.repetition_penalty}",
            ),
            (self.min_new_tokens >= 0, f"min_new_tokens is at least 0, not {self.min_new_tokens}"),
            (self.seed >= 0, f"a seed is an integer ≥ 0, not {self.seed}"),
        )


class Sampler:
    """Chooses the next token of every row."""

    def __init__(
        self,
        options: SamplingOptions,
        keys: Sequence[Sequence[int]],
        steps: int,
        device: torch.device | str = "cpu",
        stop_ids: Sequence[int] = (),
    ):
        """`keys` are integers ≥ 0 that key each row's random stream, as many for every row; `steps` the most tokens a row may draw;
        `stop_ids` may not be drawn before `min_new_tokens`."""
        self.options, self.stops_S = options, torch.tensor(stop_ids, dtype=torch.long, device=device)
        # Drawn ahead: a step is then one gather, whatever the batch
        self.uniforms_BS = row_uniforms(options.seed, keys, steps).to(device) if options.temperature > 0 else None

    def __call__(self, logits_NV: Tensor, rows_N: Tensor, step: int, history: History | None = None) -> Tensor:
        """Tokens [N] of the rows with these indices (into the constructor's `keys`) at this step (counted from 0); `history` is what they
        said so far, for those of the options that ask.

        -1 where nothing can be chosen: every logit is -inf, or some are NaN. Raises ValueError for a processor that changes the shape.
        """
        options = self.options
        if history is not None and history.seen_NV is not None:
            logits_NV = penalize_repetition(precise(logits_NV), history.seen_NV, options.repetition_penalty)
        if step < options.min_new_tokens and len(self.stops_S):
            logits_NV = logits_NV.index_fill(1, self.stops_S, -torch.inf)
        for processor in options.processors:
            assert history is not None
            processed_NV = processor(logits_NV, TextSoFar(rows_N, history.tokens_NT, step))
            if processed_NV.shape != logits_NV.shape:
                raise ValueError(f"a logit processor made {list(processed_NV.shape)} of logits {list(logits_NV.shape)}")
            logits_NV = processed_NV
        if self.uniforms_BS is None:
            best_N, tokens_N = logits_NV.max(dim=-1)
            return tokens_N.where(best_N > -torch.inf, -1)
        return draw(filter_logits(precise(logits_NV), options), self.uniforms_BS[rows_N, step])


def filter_logits(logits_NV: Tensor, options: SamplingOptions) -> Tensor:
    """Temperature, top-k, top-p, min-p, in this order; the logits of tokens left out are -inf. The temperature is not 0."""
    scores_NV = logits_NV / options.temperature
    if options.top_k is not None:
        scores_NV = keep_top_k(scores_NV, options.top_k)
    if options.top_p < 1:
        scores_NV = keep_top_p(scores_NV, options.top_p)
    if options.min_p > 0:
        scores_NV = keep_min_p(scores_NV, options.min_p)
    return scores_NV


def penalize_repetition(logits_NV: Tensor, seen_NV: Tensor, penalty: float) -> Tensor:
    """The logits of tokens that were seen (bool [N, V]), divided by the penalty if they are above 0, else multiplied with it."""
    return torch.where(seen_NV, torch.where(logits_NV < 0, logits_NV * penalty, logits_NV / penalty), logits_NV)


def keep_top_k(logits_NV: Tensor, top_k: int) -> Tensor:
    """-inf for all but the k most likely tokens and those as likely as the k-th."""
    least_N1 = logits_NV.topk(min(top_k, logits_NV.shape[-1]), dim=-1).values[:, -1:]
    return logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)


def keep_top_p(logits_NV: Tensor, top_p: float) -> Tensor:
    """-inf for all but the fewest most likely tokens with a probability of `top_p` or more together, and those as likely as the last."""
    probabilities_NV = torch.softmax(logits_NV, dim=-1)
    if probabilities_NV.device.type != "cpu" or probabilities_NV.shape[-1] <= _MOST_LIKELY:
        least_N1, _ = _last_of_nucleus(probabilities_NV.sort(dim=-1, descending=True).values, top_p)
    else:  # sorting is slow here, and looking at the result costs nothing: sort only the rows whose most likely tokens do not suffice
        least_N1, enough_N = _last_of_nucleus(probabilities_NV.topk(_MOST_LIKELY, dim=-1).values, top_p)
        if not bool(enough_N.all()):
            least_N1[~enough_N], _ = _last_of_nucleus(probabilities_NV[~enough_N].sort(dim=-1, descending=True).values, top_p)
    return logits_NV.masked_fill(probabilities_NV < least_N1, -torch.inf)


def keep_min_p(logits_NV: Tensor, min_p: float) -> Tensor:
    """-inf for tokens less likely than `min_p` times the most likely one."""
    return logits_NV.masked_fill(logits_NV < logits_NV.amax(dim=-1, keepdim=True) + math.log(min_p), -torch.inf)


def row_uniforms(seed: int, keys: Sequence[Sequence[int]], steps: int) -> Tensor:
    """Uniform [0, 1) numbers [rows, steps] in float64, one generator a row; a row's first n do not depend on `steps`."""
    return torch.from_numpy(np.stack([np.random.default_rng([_STREAM, seed, *key]).random(steps) for key in keys]))


def draw(scores_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Tokens [N] with probabilities softmax(scores), by inversion of the distribution function; a score of -inf is never drawn.

    -1 where the scores are no distribution: all are -inf, or some are NaN.
    """
    cumulative_NV = torch.softmax(scores_NV, dim=-1).cumsum(dim=-1)
    total_N1 = cumulative_NV[:, -1:]  # 1 but for rounding
    below_N1 = torch.minimum(uniforms_N[:, None].to(scores_NV.dtype) * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    tokens_N1 = torch.searchsorted(cumulative_NV, below_N1, right=True)  # the first token whose cumulative probability is above it
    return tokens_N1.where(total_N1 > 0, -1)[:, 0]


def precise(logits: Tensor) -> Tensor:
    """float64 where the device has it: a cumulative sum over 100,000 tokens loses rare ones in float32."""
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)


def _last_of_nucleus(sorted_NK: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Of probabilities from the highest down: that of the last token top-p keeps [N, 1]; whether all of them together suffice [N]."""
    sums_NK = sorted_NK.cumsum(dim=-1)
    kept_N1 = (sums_NK - sorted_NK < top_p).sum(dim=-1, keepdim=True).clamp(min=1)  # those before it do not suffice
    return sorted_NK.gather(1, kept_N1 - 1), sums_NK[:, -1] >= top_p
