"""Causal attention over documents and windows: a plan of tiles, made once a forward pass and shared by all layers of a kind.

Three plans compute the same thing: `dense_plan` (one tile with the whole mask: the reference), `tiled_plan` (query tiles that
touch only the keys inside their window; the CPU's way to train), `flex_plan` (block-sparse flex_attention; the GPU's).
Causality and windows count slots, which equal positions within a document because a row's tokens are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 256  # queries in a tile; measured best on CPU for windows of 128 to 2048 (benchmarks/attention)


@dataclass(frozen=True)
class Tile:
    """Queries [start, stop) attend to keys [first, last). `mask` broadcasts to [B, 1, queries, keys]: True where one is seen, or what is
    added to its score (0 or -inf), in the dtype of queries; None = all are seen."""

    start: int
    stop: int
    first: int
    last: int
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """How T queries, standing at the end of S keys, attend to them."""

    tiles: tuple[Tile, ...] = ()
    block_mask: Any | None = None


def visible(query_slots: Tensor, key_slots: Tensor, window: int | None, documents_BS: Tensor | None) -> Tensor:
    """True where a query may attend to a key: not later, within the window, same document. [Q, K] or [B, 1, Q, K].

    Padding (document -1) attends to padding only: no query is left without a key, so no softmax is empty.
    """
    distance = query_slots[:, None] - key_slots[None, :]
    allowed = distance >= 0
    if window is not None:
        allowed &= distance < window
    if documents_BS is not None:
        same = documents_BS[:, query_slots, None] == documents_BS[:, None, key_slots]
        allowed = (allowed & same)[:, None]
    return allowed


def dense_plan(queries: int, keys: int, window: int | None, documents_BS: Tensor | None, device: Any, dtype: Any = None) -> AttentionPlan:
    """One tile, the whole mask, boolean in every dtype: the reference for the other two."""
    slots = torch.arange(keys, device=device)
    return AttentionPlan((Tile(0, queries, 0, keys, visible(slots[keys - queries :], slots, window, documents_BS)),))


def tiled_plan(
    queries: int,
    keys: int,
    window: int | None,
    documents_BS: Tensor | None,
    device: Any,
    dtype: torch.dtype | None = None,
    tile: int = TILE,
) -> AttentionPlan:
    """Query tiles that attend only to the keys between their first query's window and their last query.

    dtype   of queries and keys: masks are then made ready to be added to scores, once for all layers, where the kernel would convert a
            boolean one at every call, forward and backward. None = boolean masks
    """
    spans = []
    offset = keys - queries
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        spans.append((start, stop, 0 if window is None else max(0, offset + start - window + 1), offset + stop))
    if documents_BS is None:
        return AttentionPlan(tuple(Tile(*span, mask) for span, mask in zip(spans, _masks(spans, window, device, dtype), strict=True)))
    slots = torch.arange(keys, device=device)
    tiles = []
    for start, stop, first, last in spans:
        mask = visible(slots[offset + start : offset + stop], slots[first:last], window, documents_BS)
        tiles.append(Tile(start, stop, first, last, _addend(mask, dtype)))
    return AttentionPlan(tuple(tiles))


def _masks(spans: list[tuple[int, int, int, int]], window: int | None, device: Any, dtype: torch.dtype | None) -> list[Tensor | None]:
    """The masks of tiles in one document: what is seen depends on distance alone, so all are the bottom right corner of the largest."""
    most, widest = max(stop - start for start, stop, _, _ in spans), max(last - first for _, _, first, last in spans)
    if most == 1:
        return [None] * len(spans)  # one query at the end of its own window sees everything in it
    slots = torch.arange(widest, device=device)
    largest = _addend(visible(slots[widest - most :], slots, window, None), dtype)
    return [largest[most - (stop - start) :, widest - (last - first) :] for start, stop, first, last in spans]


def _addend(mask: Tensor, dtype: torch.dtype | None) -> Tensor:
    return mask if dtype is None else torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def flex_plan(queries: int, keys: int, window: int | None, documents_BS: Tensor | None, device: Any, dtype: Any = None) -> AttentionPlan:
    """A block mask for flex_attention, of any dtype."""
    from torch.nn.attention.flex_attention import create_block_mask

    offset = keys - queries

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q + offset - k
        ok = distance >= 0
        if window is not None:
            ok = ok & (distance < window)
        if documents_BS is not None:
            ok = ok & (documents_BS[b, q + offset] == documents_BS[b, k])
        return ok

    batch = None if documents_BS is None else documents_BS.shape[0]
    return AttentionPlan(block_mask=create_block_mask(allowed, batch, None, queries, keys, device=device))


def make_plan(
    queries: int, keys: int, window: int | None, documents_BS: Tensor | None, device: torch.device, dtype: torch.dtype | None = None
) -> AttentionPlan:
    """The fast plan for this device. `documents_BS` covers the keys; None = one document, no padding. `dtype` is that of the queries."""
    if device.type == "cuda" and queries > 1:
        return flex_plan(queries, keys, window, documents_BS, device)
    return tiled_plan(queries, keys, window, documents_BS, device, dtype)


def attend(query_BHTd: Tensor, key_BGSd: Tensor, value_BGSd: Tensor, plan: AttentionPlan) -> Tensor:
    """Softmax attention [B, H, T, d] as planned; H query heads share G key/value heads."""
    if plan.block_mask is not None:
        return _flex(query_BHTd)(query_BHTd, key_BGSd, value_BGSd, block_mask=plan.block_mask, enable_gqa=True)
    if query_BHTd.shape[2] == 1:  # decoding: the queries that share a key head become its rows, no key is repeated
        tile = plan.tiles[0]
        grouped = query_BHTd.view(query_BHTd.shape[0], key_BGSd.shape[1], -1, query_BHTd.shape[3])
        keys, values = _slots(key_BGSd, tile), _slots(value_BGSd, tile)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=tile.mask).view_as(query_BHTd)
    # Split rather than sliced: the gradient is then one concatenation, not a zero-filled tensor of full size for every tile.
    queries = query_BHTd.split([t.stop - t.start for t in plan.tiles], dim=2)
    parts = [
        F.scaled_dot_product_attention(
            query,
            _slots(key_BGSd, t),
            _slots(value_BGSd, t),
            attn_mask=t.mask,
            enable_gqa=query_BHTd.shape[1] != key_BGSd.shape[1],
        )
        for query, t in zip(queries, plan.tiles, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _slots(x_BGSd: Tensor, tile: Tile) -> Tensor:
    """The keys or values that a tile attends to."""
    return x_BGSd if (tile.first, tile.last) == (0, x_BGSd.shape[2]) else x_BGSd[:, :, tile.first : tile.last]


_compiled_flex: Any = None


def _flex(query: Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    global _compiled_flex
    if query.device.type == "cpu":
        return flex_attention
    if _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention)  # prefixes change the shapes: let it go dynamic
    return _compiled_flex
