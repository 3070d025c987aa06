"""Logits to tokens. A row's random numbers are a function of (seed, its key, step): neighbours and batch size do not matter.

The order is that of transformers: repetition penalty, minimum length, logit processors (all three in `steps`), then temperature,
top-k, top-p, min-p, each on what the one before it left. At temperature 0 the most likely token is taken, which these four can't change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_STREAM = 0x73616D70  # keeps these streams apart from those of training with the same seed
_MOST_LIKELY = 1024  # tokens that usually hold the whole nucleus of top-p


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a token is drawn.

    temperature         divides the logits; 0 = the most likely token
    top_k               only the k most likely tokens, and those as likely as the k-th; None = all
    top_p               only the most likely tokens that together have this probability, and those as likely as the last of them; 1 = all
    min_p               only tokens with at least this share of the most likely one's probability; 0 = all
    repetition_penalty  tokens of the prompt and the new text: logits above 0 are divided by it, others multiplied; 1 = none
    seed                of the draws

    Raises ValueError for a value that means nothing.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature is a number ≥ 0, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k keeps at least 1 token, not {self.top_k} (None = all)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a probability above 0 and up to 1, not {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p is at least 0 and below 1, not {self.min_p}")
        if not math.isfinite(self.repetition_penalty) or self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty is a number above 0, not {self.repetition_penalty}")
        if self.seed < 0:
            raise ValueError(f"a seed is an integer ≥ 0, not {self.seed}")


class Sampler:
    """Chooses the next token of every row."""

    def __init__(self, options: SamplingOptions, keys: Sequence[Sequence[int]], steps: int, device: torch.device | str = "cpu"):
        """`keys` are integers ≥ 0 that key each row's random stream, as many for every row; `steps` the most tokens a row may draw."""
        self.options = options
        # Drawn ahead: a step is then one gather, whatever the batch
        self.uniforms_BS = row_uniforms(options.seed, keys, steps).to(device) if options.temperature > 0 else None

    def __call__(self, logits_NV: Tensor, rows_N: Tensor, step: int) -> Tensor:
        """Tokens [N] of the rows with these indices (into the constructor's `keys`) at this step (counted from 0).

        -1 where nothing can be chosen: every logit is -inf, or some are NaN.
        """
        if self.uniforms_BS is None:
            best_N, tokens_N = logits_NV.max(dim=-1)
            return tokens_N.where(best_N > -torch.inf, -1)
        return draw(filter_logits(precise(logits_NV), self.options), self.uniforms_BS[rows_N, step])


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
