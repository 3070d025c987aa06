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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fullband.feedback.noise import keyed_uniform
from fullband.feedback.passes import FeedbackModel, check_length, fused_pass

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
        """True behind the prefix, or where a mask says so and behind the first position, which nothing is fed to: bool [B or 1, length]."""
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
    positions_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
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
    if prefixes and (trunk.dropout or not trunk.reuses):
        why = "it draws dropout anew in each pass" if trunk.dropout else "its activation checkpointing drops the cache"
        warnings.warn(f"the trunk's prefixes are not reused, every pass reads whole rows: {why}", stacklevel=2)
        return multipass_reference(model, tokens_BT, prefixes, positions_BT, documents_BT, jitter)
    embeddings = trunk.embed(tokens_BT)
    length = tokens_BT.shape[1]
    check_length(model, length)
    cuts = [_first_fused(prefix, length) // rounding * rounding for prefix in prefixes]
    in_pieces = not trunk.crops if pieces is None else pieces
    if in_pieces:
        cuts = _without_single_positions(cuts, length)
    plain, caches = _plain_pass(model, embeddings, positions_BT, documents_BT, cuts, in_pieces)
    outputs = [PassStates(1, 0, length - 1, plain)]
    previous = plain
    for k, (prefix, start) in enumerate(zip(prefixes, cuts, strict=True), start=2):
        states, _ = fused_pass(
            model,
            embeddings[:, start:],
            previous[:, start:],
            boundary_BD=previous[:, start - 1] if start else None,
            positions_BT=_from(positions_BT, start),
            documents_BT=_from(documents_BT, start),
            cache=caches[start] if start else None,
            plain_BT=None if isinstance(prefix, int) and start > prefix else plain_mask(prefix, start, length, tokens_BT.device),
            noise_BTD=jitter(k, start, length, embeddings) if jitter else None,
        )
        outputs.append(PassStates(k, start, prefix, states))
        previous = torch.cat([plain[:, :start], states], dim=1)
    return outputs


def multipass_reference(
    model: FeedbackModel,
    tokens_BT: Tensor,
    prefixes: list[Prefix],
    positions_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
    jitter: Jitter | None = None,
) -> list[PassStates]:
    """The naive computation: K full passes over all positions, the prefix's inputs reverted to plain embeddings (Listing 3)."""
    embeddings = model.trunk.embed(tokens_BT)
    length = tokens_BT.shape[1]
    check_length(model, length)
    states, _ = model.trunk(embeddings, positions_BT, documents_BT)
    outputs = [PassStates(1, 0, length - 1, states)]
    for k, prefix in enumerate(prefixes, start=2):
        _first_fused(prefix, length)
        states, _ = fused_pass(
            model,
            embeddings,
            states,
            positions_BT=positions_BT,
            documents_BT=documents_BT,
            plain_BT=plain_mask(prefix, 0, length, tokens_BT.device),
            noise_BTD=jitter(k, 0, length, embeddings) if jitter else None,
        )
        outputs.append(PassStates(k, 0, prefix, states))
    return outputs


def _plain_pass(
    model: FeedbackModel, embeddings: Tensor, positions: Tensor | None, documents: Tensor | None, cuts: list[int], pieces: bool
) -> tuple[Tensor, dict[int, Any]]:
    """Pass 1, and its cache as it stood at every cut."""
    if not cuts:
        return model.trunk(embeddings, positions, documents)[0], {}
    if not pieces:
        states, cache = model.trunk(embeddings, positions, documents, keep="all")
        assert cache is not None
        return states, {cut: cache.crop(cut) for cut in cuts if cut}
    cache, caches, parts = None, {}, []
    bounds = sorted({0, *cuts, embeddings.shape[1]})
    for start, stop in pairwise(bounds):
        here = slice(start, stop)
        part, cache = model.trunk(
            embeddings[:, here],
            None if positions is None else positions[:, here],
            None if documents is None else documents[:, here],
            cache,
            keep="all",
        )
        assert cache is not None
        parts.append(part)
        caches[stop] = cache.fork()
    return torch.cat(parts, dim=1), caches


def _first_fused(prefix: Prefix, length: int) -> int:
    """The first position that is computed again: behind the smallest prefix of the rows, or the first fused one of a mask."""
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
    """The cuts, moved down where a piece or a pass behind a cache would be a single position: recurrent layers read one by kernels that
    have no backward. What lies between a moved cut and its prefix is computed again, plainly."""
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


def _from(x_BT: Tensor | None, start: int) -> Tensor | None:
    return None if x_BT is None else x_BT[:, start:]
