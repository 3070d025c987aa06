"""The paper's decoder (App. A), in plain PyTorch.

- tied embedding and head; one input norm that plain and fused inputs share (App. C)
- grouped-query attention, RMS-normalised queries and keys, rotary positions, a sigmoid gate on every head's output
- sliding windows, every sixth layer full
- SiLU GLU feed-forward
- RMSNorm before and after each residual branch and at the end; branches scaled by 1/sqrt(2L) after their norm (depth scaling)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullband.config import TrunkConfig
from fullband.layout import NOWHERE, Layout
from fullband.trunk.attention import AttentionPlan, attend, make_plan
from fullband.trunk.cache import Cache, Slots, extend_documents
from fullband.trunk.pointwise import RMSNorm, rotate
from fullband.trunk.protocol import Keep, LowerOutput, Merge, TrunkOutput, check_depths
from fullband.trunk.rope import rotary
from fullband.trunk.static_cache import StaticCache


class Query(NamedTuple):
    """Queries [B, H, T, head dim], and how far the head gates let their answers through [B, H, T, 1]."""

    vectors: Tensor
    opened: Tensor


class Attention(nn.Module):
    def __init__(self, config: TrunkConfig):
        super().__init__()
        width, size = config.width, config.head_size
        self.head_size = size
        self.query = nn.Linear(width, config.heads * size, bias=False)
        self.key = nn.Linear(width, config.kv_heads * size, bias=False)
        self.value = nn.Linear(width, config.kv_heads * size, bias=False)
        self.gate = nn.Linear(width, config.heads, bias=False)
        self.output = nn.Linear(config.heads * size, width, bias=False)
        self.query_norm = RMSNorm(size, config.norm_eps)
        self.key_norm = RMSNorm(size, config.norm_eps)

    def project(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Query, Tensor]:
        """What the queries need, and the new keys and values [2, B, KV heads, T, head dim]."""
        batch, length, _ = x_BTD.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.head_size).transpose(1, 2)

        query = rotate(self.query_norm(heads(self.query(x_BTD))), cos, sin)
        key = rotate(self.key_norm(heads(self.key(x_BTD))), cos, sin)
        opened = torch.sigmoid(self.gate(x_BTD)).transpose(1, 2)[..., None]
        return Query(query, opened), torch.stack([key, heads(self.value(x_BTD)).to(key.dtype)])

    def attend(self, query: Query, keys_values: Tensor, plan: AttentionPlan) -> Tensor:
        """Attention output [B, T, D] over all keys and values [2, B, KV heads, S, head dim]."""
        keys, values = keys_values.unbind()
        attended = attend(query.vectors, keys, values, plan) * query.opened
        batch, _, length, _ = attended.shape
        return self.output(attended.transpose(1, 2).reshape(batch, length, -1))


class Glu(nn.Module):
    def __init__(self, config: TrunkConfig):
        super().__init__()
        self.gate = nn.Linear(config.width, config.glu_width, bias=False)
        self.up = nn.Linear(config.width, config.glu_width, bias=False)
        self.down = nn.Linear(config.glu_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: TrunkConfig):
        super().__init__()
        branch_scale = 1 / math.sqrt(2 * config.layers)  # depth scaling
        self.attention_norm_in = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.attention_norm_out = RMSNorm(config.width, config.norm_eps, branch_scale)
        self.glu_norm_in = RMSNorm(config.width, config.norm_eps)
        self.glu = Glu(config)
        self.glu_norm_out = RMSNorm(config.width, config.norm_eps, branch_scale)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        past: Tensor | None,
        plan: AttentionPlan,
        extend: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output [B, T, D], and the new keys and values; a pure function of tensors, for autograd, checkpointing and compile.

        `extend` makes all keys and values of the new ones, in place of `past`: how a cache that is written to takes part.
        """
        query, new = self.attention.project(self.attention_norm_in(x), cos, sin)
        keys_values = extend(new) if extend else new if past is None else torch.cat([past, new], dim=-2)
        x = x + self.attention_norm_out(self.attention.attend(query, keys_values, plan))
        return x + self.glu_norm_out(self.glu(self.glu_norm_in(x))), new


class Decoder(nn.Module):
    """The App. A trunk. See `protocol.Trunk` for the contract."""

    can_crop_cache = True
    supports_prefix_reuse = True
    draws_dropout = False
    context_note = ""

    def __init__(self, config: TrunkConfig):
        super().__init__()
        self.config = config
        self.width, self.context, self.vocab_size = config.width, config.context, config.vocab_size
        self.windows = tuple(None if config.layer_is_full(i) else config.window for i in range(config.layers))
        self.entry = 0
        self.sources: tuple[int, ...] = ()
        self.activation_checkpointing = False
        self.plan = make_plan  # tests put the dense reference here
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.input_norm = RMSNorm(config.width, config.norm_eps)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = RMSNorm(config.width, config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices N(0, 1/fan_in), embedding N(0, 0.02²), norms 1. Branch norms make the matrices' scale immaterial."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def connect(self, entry: int, sources: tuple[int, ...]) -> None:
        self.entry, self.sources = check_depths(entry, sources, len(self.blocks))

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def layers(self) -> nn.ModuleList:
        return self.blocks

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight

    def head(self, top: Tensor) -> Tensor:
        return F.linear(top, self.head_weight)

    def embeddings(self, tokens_BT: Tensor) -> Tensor:
        return self.embedding(tokens_BT)

    def below(self, given: Tensor, layout: Layout = NOWHERE, cache: Cache | StaticCache | None = None, keep: Keep = "none") -> LowerOutput:
        x = self.input_norm(given if given.is_floating_point() else self.embedding(given))
        if not self.entry:
            return LowerOutput(x, (), None)
        x, carried, cache = self._through(x, layout, cache, keep, 0, self.entry, {})
        return LowerOutput(x, carried, cache)

    def above(
        self,
        x_BTD: Tensor,
        layout: Layout = NOWHERE,
        cache: Cache | StaticCache | None = None,
        keep: Keep = "none",
        merges: Mapping[int, Merge] | None = None,
    ) -> TrunkOutput:
        x, carried, cache = self._through(x_BTD, layout, cache, keep, self.entry, len(self.blocks), merges or {})
        return TrunkOutput(self.final_norm(x), carried, cache)

    def _through(
        self, x: Tensor, layout: Layout, cache: Cache | StaticCache | None, keep: Keep, first: int, last: int, merges: Mapping[int, Merge]
    ) -> tuple[Tensor, tuple[Tensor, ...], Cache | StaticCache | None]:
        """Layers first + 1 … last: (the residual stream, the streams at the source depths among them, the cache of these layers)."""
        batch, length, _ = x.shape
        device, dtype = x.device, _compute_dtype(x)
        if isinstance(cache, StaticCache) and length != 1:
            raise ValueError(f"a static cache takes one token a sequence at a time, not {length}")
        past_length = cache.length if isinstance(cache, Cache) else 0
        positions_BT = layout.positions_BT
        if positions_BT is None:
            filled = cache.filled.view(1, 1) if isinstance(cache, StaticCache) else None
            positions_BT = torch.arange(past_length, past_length + length, device=device)[None] if filled is None else filled
        cos, sin = rotary(positions_BT, self.config, dtype)
        fixed_plans = cache.plans(positions_BT, dtype) if isinstance(cache, StaticCache) else None
        documents = None if isinstance(cache, StaticCache) else extend_documents(cache, layout.documents_BT, batch, length, device)
        plans: dict[tuple[int, int | None], AttentionPlan] = {}
        kept: list[Slots] = []
        wanted = [depth for depth in self.sources if first <= depth and (depth < last or last == len(self.blocks))] if self.sources else ()
        carried = [x] if first in wanted else []
        for place, depth in enumerate(range(first, last)):
            block, window = self.blocks[depth], self.windows[depth]
            if isinstance(cache, StaticCache):
                assert fixed_plans is not None
                x = _run_eagerly(block, x, cos, sin, fixed_plans[place], partial(cache.write, place))
            else:
                past = cache.layers[place] if cache else None
                keys = length + _reachable(past, window)
                if (keys, window) not in plans:
                    key_documents = None if documents is None else documents.tensor[:, documents.tensor.shape[1] - keys :]
                    plans[keys, window] = self.plan(length, keys, window, key_documents, device, dtype)
                x, extended = self._run(block, x, cos, sin, past, keys, plans[keys, window], keep)
                if extended is not None:
                    kept.append(extended if keep == "all" or window is None else extended.last(window - 1))
            if depth + 1 in merges:
                x = merges[depth + 1](x)
            if depth + 1 in wanted:
                carried.append(x)
        if isinstance(cache, StaticCache):
            cache.advance()
            return x, tuple(carried), cache
        windows = self.windows[first:last]
        return x, tuple(carried), None if keep == "none" else Cache(tuple(kept), windows, past_length + length, documents)

    def _run(
        self, block: Any, x: Tensor, cos: Tensor, sin: Tensor, past: Slots | None, keys: int, plan: AttentionPlan, keep: Keep
    ) -> tuple[Tensor, Slots | None]:
        """One block; the second output is the layer's past with the new slots after it."""
        if torch.is_grad_enabled():
            reachable = keys - x.shape[1]
            past_tensor = _last(past, reachable).tensor if past is not None and reachable else None
            if self.activation_checkpointing:
                x, new = checkpoint(block, x, cos, sin, past_tensor, plan, use_reentrant=False)
            else:
                x, new = block(x, cos, sin, past_tensor, plan)
            return x, None if keep == "none" else _append(past, new)
        extended: Slots | None = None

        def extend(new: Tensor) -> Tensor:
            nonlocal extended
            extended = _append(past, new)  # in place: a decoding step copies no keys
            return _last(extended, keys).tensor

        return _run_eagerly(block, x, cos, sin, plan, extend), extended


def _run_eagerly(block: Any, x: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, extend: Callable[[Tensor], Tensor]) -> Tensor:
    """A block that writes into a cache, hooks included, but past a compiled `forward`: every length of the cache would be compiled."""
    return block._call_impl(x, cos, sin, None, plan, extend)[0]


def _reachable(past: Slots | None, window: int | None) -> int:
    """How many cached slots a new query can see: a window of W includes the query's own key."""
    cached = 0 if past is None else len(past)
    return cached if window is None else min(cached, window - 1)


def _append(past: Slots | None, new: Tensor) -> Slots:
    return Slots.of(new, -2) if past is None else past.append(new)


def _last(layer: Slots, slots: int) -> Slots:
    kept = min(len(layer), slots)
    return layer.narrow(len(layer) - kept, kept)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
