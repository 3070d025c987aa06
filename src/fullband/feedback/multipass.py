"""Multi-pass training (Eqs. 9-12, Listings 1 and 3), with exact reuse of the plain prefix.

In pass k, positions t ≤ p_k are plain (prefix mixin), so their states, keys and values are pass 1's own: they are never computed
again. The suffix t > p_k attends to pass 1's cache cut at p_k and carries the states ĥ of pass k-1 (pass 1's where that pass was itself
plain). Where starts are rounded, a pass begins at a multiple before its suffix, and what lies between is computed again, plain.
`multipass_reference` runs every pass in full; loss and gradients are the same. It is also what is left for trunks that cannot keep a
cache under autograd.

Rows whose prefixes differ, and masks of plain positions (prompts between answers, in packed rows), share what comes before the first
fused position of any row.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fullband.feedback.noise import keyed_uniform
from fullband.feedback.passes import FeedbackModel, Inputs, Pass, PassOutput, below, check_length, parallel, plain_pass
from fullband.layout import NOWHERE, Layout

# The last plain position: one for all rows, or [B]; position 0 is always plain, so 0 means no mixin. Or bool [B, T], True where plain.
Prefix = int | Tensor


@dataclass(frozen=True)
class PassStates:
    """Top states [B, T - start, D] of positions `start` … T-1 in pass k. Positions before `start` are equal to pass 1's."""

    k: int
    start: int
    prefix: Prefix
    states: Tensor

    def fused(self, length: int, device: Any) -> Tensor:
        """True after the prefix, or where a mask says so and after the first position, which nothing is fed to: bool [B or 1, length]."""
        fused = ~plain_mask(self.prefix, 0, length, device)
        fused[:, 0] = False
        return fused


@dataclass(frozen=True)
class Jitter:
    """Uniform[-sigma, sigma] noise on carried states (Eq. 13), keyed by (seed, step, row, position, pass)."""

    sigma: float
    seed: int
    step: int
    rows: Tensor  # [B], the rows' numbers in the global batch

    def __call__(self, k: int, start: int, stop: int, like: Tensor) -> Tensor | None:
        """Noise [B, stop - start, D] for the states carried into positions start … stop - 1 of pass k."""
        if not self.sigma:
            return None
        slots = torch.arange(start, stop, device=like.device)
        noise = keyed_uniform((self.seed, self.step, k), self.rows.to(like.device), slots, like.shape[-1], like.dtype)
        return self.sigma * noise


def multipass(
    model: FeedbackModel,
    tokens_BT: Tensor,
    prefixes: list[Prefix],
    layout: Layout = NOWHERE,
    jitter: Jitter | None = None,
    pieces: bool | None = None,
    rounding: int = 1,
) -> list[PassStates]:
    """States of pass 1 (all positions) and of passes 2 … K (each from its own prefix on); nothing is detached.

    prefixes   p_2 … p_K, so K = 1 + len(prefixes); all drawn before pass 1
    rounding   passes 2 … K start at multiples of it, at or before their first fused position: few shapes to compile, the same values
    pieces     run pass 1 in pieces cut at the prefixes instead of cropping its cache: what recurrent trunks need
    Raises ValueError if a prefix leaves no position to fuse; a mask may: its pass is then pass 1 again but for the last position.
    """
    trunk = model.trunk
    if prefixes and (trunk.draws_dropout or not trunk.supports_prefix_reuse):
        why = "it draws dropout anew in each pass" if trunk.draws_dropout else "its activation checkpointing drops the cache"
        warnings.warn(f"the trunk's prefixes are not reused, every pass runs over whole rows: {why}", stacklevel=2)
        return multipass_reference(model, tokens_BT, prefixes, layout, jitter)
    length = tokens_BT.shape[1]
    check_length(model, length)
    inputs, _ = below(model, tokens_BT, layout)
    cuts = [_first_fused(prefix, length) // rounding * rounding for prefix in prefixes]
    in_pieces = not trunk.can_crop_cache if pieces is None else pieces
    if in_pieces:
        cuts = _without_single_positions(cuts, length)
    first, caches = _plain_pass(model, inputs, cuts, in_pieces)
    passes = [
        Pass(
            start,
            cache=caches[start] if start else None,
            plain_BT=None if isinstance(prefix, int) and start > prefix else plain_mask(prefix, start, length, tokens_BT.device),
            noise_BTD=jitter(k, start, length, inputs.x_BTD) if jitter else None,
        )
        for k, (prefix, start) in enumerate(zip(prefixes, cuts, strict=True), start=2)
    ]
    return _collected(first, zip(prefixes, cuts, parallel(model, inputs, first, passes), strict=True))


def multipass_reference(
    model: FeedbackModel, tokens_BT: Tensor, prefixes: list[Prefix], layout: Layout = NOWHERE, jitter: Jitter | None = None
) -> list[PassStates]:
    """The naive computation: K full passes over all positions, the prefix's inputs reverted to plain embeddings (Listing 3)."""
    length = tokens_BT.shape[1]
    check_length(model, length)
    for prefix in prefixes:
        _first_fused(prefix, length)
    inputs, _ = below(model, tokens_BT, layout)
    first = plain_pass(model, inputs)
    passes = [
        Pass(
            plain_BT=plain_mask(prefix, 0, length, tokens_BT.device),
            noise_BTD=jitter(k, 0, length, inputs.x_BTD) if jitter else None,
        )
        for k, prefix in enumerate(prefixes, start=2)
    ]
    return _collected(first, zip(prefixes, [0] * len(prefixes), parallel(model, inputs, first, passes), strict=True))


def _collected(first: PassOutput, later: Iterable[tuple[Prefix, int, PassOutput]]) -> list[PassStates]:
    outputs = [PassStates(1, 0, first.top_BTD.shape[1] - 1, first.top_BTD)]
    return outputs + [PassStates(k, start, prefix, output.top_BTD) for k, (prefix, start, output) in enumerate(later, start=2)]


def _plain_pass(model: FeedbackModel, inputs: Inputs, cuts: list[int], pieces: bool) -> tuple[PassOutput, dict[int, Any]]:
    """Pass 1, and its cache as it stood at every cut."""
    if not cuts:
        return plain_pass(model, inputs), {}
    if not pieces:
        output = plain_pass(model, inputs, keep="all")
        return output, {cut: output.cache.crop(cut) for cut in cuts if cut}
    cache, caches, parts = None, {}, []
    for start, stop in pairwise(sorted({0, *cuts, inputs.length})):
        part = plain_pass(model, inputs[start:stop], cache, keep="all")
        cache = part.cache
        parts.append(part)
        caches[stop] = cache.fork()
    return PassOutput(*(torch.cat([part[i] for part in parts], dim=1) for i in (0, 1))), caches


def _first_fused(prefix: Prefix, length: int) -> int:
    """The first position that is computed again: after the smallest prefix of the rows, or the first fused one of a mask."""
    if isinstance(prefix, Tensor) and prefix.dtype == torch.bool:
        if prefix.shape[-1] != length:
            raise ValueError(f"a mask of plain positions has one entry a token: {prefix.shape[-1]} for {length} tokens")
        fused_T = (~prefix).any(dim=0)
        return max(1, int(fused_T.int().argmax())) if bool(fused_T.any()) else length - 1
    smallest = int(prefix.min()) if isinstance(prefix, Tensor) else prefix
    largest = int(prefix.max()) if isinstance(prefix, Tensor) else prefix
    if smallest < 0 or largest > length - 2:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"prefix {wrong} is outside 0 … {length - 2}: a pass must fuse at least one position")
    return smallest + 1


def _without_single_positions(cuts: list[int], length: int) -> list[int]:
    """The cuts, moved down where a piece or a pass after a cache would be a single position: recurrent layers run one by kernels that
    have no backward. What lies between a moved cut and its prefix is computed again, without feedback."""
    kept = [0]
    for cut in sorted(min(cut, length - 2) for cut in cuts):
        if cut - kept[-1] > 1 or kept == [0]:
            kept.append(cut)
    return [max(place for place in kept if place <= cut) for cut in cuts]


def plain_mask(prefix: Prefix, start: int, length: int, device: Any) -> Tensor:
    """True where the positions `start` … length - 1 are plain, bool [B or 1, length - start]."""
    if not isinstance(prefix, Tensor):
        return torch.arange(start, length, device=device)[None] <= prefix
    if prefix.dtype == torch.bool:
        return prefix[:, start:].to(device)
    return torch.arange(start, length, device=device)[None] <= prefix.to(device)[:, None]
