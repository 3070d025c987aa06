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
    """Queries [start, stop) read keys [first, last); mask broadcasts to [B, 1, queries, keys], None = all of them."""

    start: int
    stop: int
    first: int
    last: int
    mask: Tensor | None


@dataclass(frozen=True)
class Plan:
    """How T queries, standing at the end of S keys, read them."""

    tiles: tuple[Tile, ...] = ()
    block_mask: Any | None = None


def visible(query_slots: Tensor, key_slots: Tensor, window: int | None, documents_BS: Tensor | None) -> Tensor:
    """True where a query may read a key: not later, within the window, same document. [Q, K] or [B, 1, Q, K].

    Padding (document -1) reads padding only: no query is left without a key, so no softmax is empty.
    """
    distance = query_slots[:, None] - key_slots[None, :]
    allowed = distance >= 0
    if window is not None:
        allowed &= distance < window
    if documents_BS is not None:
        same = documents_BS[:, query_slots, None] == documents_BS[:, None, key_slots]
        allowed = (allowed & same)[:, None]
    return allowed


def dense_plan(queries: int, keys: int, window: int | None, documents_BS: Tensor | None, device: Any) -> Plan:
    """One tile, the whole mask: the reference for the other two."""
    slots = torch.arange(keys, device=device)
    return Plan((Tile(0, queries, 0, keys, visible(slots[keys - queries :], slots, window, documents_BS)),))


def tiled_plan(queries: int, keys: int, window: int | None, documents_BS: Tensor | None, device: Any, tile: int = TILE) -> Plan:
    """Query tiles that read only the keys between their first query's window and their last query."""
    tiles = []
    offset = keys - queries
    slots = torch.arange(keys, device=device)
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        last = offset + stop
        first = 0 if window is None else max(0, offset + start - window + 1)
        if stop - start == 1 and documents_BS is None:
            mask = None  # one query at the end of its own window sees everything in it
        else:
            mask = visible(slots[offset + start : last], slots[first:last], window, documents_BS)
        tiles.append(Tile(start, stop, first, last, mask))
    return Plan(tuple(tiles))


def flex_plan(queries: int, keys: int, window: int | None, documents_BS: Tensor | None, device: Any) -> Plan:
    """A block mask for flex_attention."""
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
    return Plan(block_mask=create_block_mask(allowed, batch, None, queries, keys, device=device))


def make_plan(queries: int, keys: int, window: int | None, documents_BS: Tensor | None, device: torch.device) -> Plan:
    """The fast plan for this device. `documents_BS` covers the keys; None = one document, no padding."""
    if device.type == "cuda" and queries > 1:
        return flex_plan(queries, keys, window, documents_BS, device)
    return tiled_plan(queries, keys, window, documents_BS, device)


def attend(query_BHTd: Tensor, key_BGSd: Tensor, value_BGSd: Tensor, plan: Plan) -> Tensor:
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
    """The keys or values that a tile reads."""
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
