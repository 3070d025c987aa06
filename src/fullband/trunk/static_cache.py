"""Keys and values in buffers of fixed size and address: what a compiled or recorded decoding step needs."""

from __future__ import annotations

import torch
from torch import Tensor

from fullband.trunk.attention import AttentionPlan, Tile
from fullband.trunk.cache import Cache


class StaticCache:
    """What a trunk remembers, for one token a row at a time. Unlike a `Cache` it is changed in place.

    layers   keys and values [2, B, KV heads, slots, head dim] of each layer: `capacity` slots where attention is full, the window's else.
             Each is a ring: slot s of the text stands at s % slots, where it replaces one that no query can see any more
    filled   slots of the text that are filled, a LongTensor [] on the model's device

    Which keys a query sees follows from their age alone. A row's tokens are contiguous, so at position p it sees the keys of age 0 … p;
    older ones are padding, were never written, or lie outside the window, whose ring holds no more.
    """

    def __init__(self, cache: Cache, capacity: int):
        """A copy of `cache` with room for `capacity` slots in all. Raises ValueError if it holds more than that already."""
        self.windows = cache.windows
        self.capacity = capacity
        slots = [capacity if window is None else min(window, capacity) for window in cache.windows]
        shapes = [(2, cache.batch, layer.tensor.shape[2], n, layer.tensor.shape[4]) for layer, n in zip(cache.layers, slots, strict=True)]
        like = cache.layers[0].tensor
        self.layers = tuple(like.new_zeros(shape) for shape in shapes)  # not empty: what is hidden must be finite
        self.filled = torch.zeros((), dtype=torch.long, device=like.device)
        self.load(cache)

    @property
    def length(self) -> int:
        """Slots of the text that have been run, as a number on the host."""
        return int(self.filled)

    def load(self, cache: Cache) -> None:
        """Take over another cache with as many rows, in the same buffers. Raises ValueError if it does not fit."""
        if cache.length > self.capacity:
            raise ValueError(f"a cache of {cache.length} slots does not fit into {self.capacity}")
        if cache.batch != self.layers[0].shape[1] or cache.windows != self.windows:
            raise ValueError(f"these buffers hold {self.layers[0].shape[1]} rows of another cache's shape, not {cache.batch}")
        for buffer, layer in zip(self.layers, cache.layers, strict=True):
            newest = layer.last(buffer.shape[-2])
            slots = torch.arange(cache.length - len(newest), cache.length, device=buffer.device)
            buffer.index_copy_(-2, slots % buffer.shape[-2], newest.tensor)
        self.filled.fill_(cache.length)

    def write(self, layer: int, new: Tensor) -> Tensor:
        """Put the keys and values [2, B, KV heads, 1, head dim] of the next slot into their place; returns the layer's whole ring."""
        ring = self.layers[layer]
        return ring.index_copy_(-2, (self.filled % ring.shape[-2])[None], new)

    def plans(self, positions_B1: Tensor, dtype: torch.dtype) -> list[AttentionPlan]:
        """How the next token of each row, at these positions ([1, 1]: one for all), attends to each layer's ring once it is in there."""
        by_size = {slots: self._plan(slots, positions_B1, dtype) for slots in {ring.shape[-2] for ring in self.layers}}
        return [by_size[ring.shape[-2]] for ring in self.layers]

    def advance(self) -> None:
        """The slot that `write` has filled in every layer belongs to the past now."""
        self.filled.add_(1)

    def _plan(self, slots: int, positions_B1: Tensor, dtype: torch.dtype) -> AttentionPlan:
        ages_S = (self.filled - torch.arange(slots, device=self.filled.device)) % slots
        hidden_BS = ages_S > positions_B1
        bias = torch.zeros(hidden_BS.shape, dtype=dtype, device=hidden_BS.device).masked_fill_(hidden_BS, -torch.inf)
        return AttentionPlan((Tile(0, 1, 0, slots, bias[:, None, None]),))
