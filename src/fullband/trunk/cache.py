"""Keys and values of the past, as an immutable value that grows without copying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class _Store:
    """A tensor with room to grow along its slot dimension; `filled` slots are taken."""

    def __init__(self, tensor: Tensor, filled: int):
        self.tensor, self.filled = tensor, filled


class Slots:
    """Slots [start, stop) of a store. A Slots never changes: appending to the newest view of a store writes after it in place,
    appending to an older view, or under autograd, copies. So a decoding step costs O(1), and a fork costs nothing."""

    def __init__(self, store: _Store, start: int, stop: int, dim: int):
        self._store, self._start, self._stop, self._dim = store, start, stop, dim

    @classmethod
    def of(cls, tensor: Tensor, dim: int) -> Slots:
        """The slots of `tensor` along `dim` (negative)."""
        return cls(_Store(tensor, tensor.shape[dim]), 0, tensor.shape[dim], dim)

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def tensor(self) -> Tensor:
        return self._store.tensor.narrow(self._dim, self._start, len(self))

    def append(self, new: Tensor) -> Slots:
        added = new.shape[self._dim]
        if torch.is_grad_enabled() and (new.requires_grad or self._store.tensor.requires_grad):
            return Slots.of(torch.cat([self.tensor, new], self._dim), self._dim)
        store, start, stop = self._store, self._start, self._stop
        if store.filled != stop or stop + added > store.tensor.shape[self._dim]:
            shape = list(new.shape)
            shape[self._dim] = max(2 * len(self), len(self) + added, 64)
            grown = new.new_empty(shape)
            grown.narrow(self._dim, 0, len(self)).copy_(self.tensor)
            store, start, stop = _Store(grown, len(self)), 0, len(self)
        store.tensor.narrow(self._dim, stop, added).copy_(new)
        store.filled = stop + added
        return Slots(store, start, stop + added, self._dim)

    def narrow(self, first: int, length: int) -> Slots:
        """Slots first … first + length - 1 of this view."""
        return Slots(self._store, self._start + first, self._start + first + length, self._dim)

    def rollback(self, length: int) -> Slots:
        """The first `length` slots; those after them are given up, so that appending overwrites them in place."""
        if self._store.filled == self._stop:
            self._store.filled = self._start + length
        return self.narrow(0, length)

    def last(self, slots: int) -> Slots:
        """The last `slots` of them; copied if the store is so much larger that keeping it would waste memory."""
        kept = min(len(self), slots)
        if self._store.tensor.shape[self._dim] > 4 * kept + 64:
            return Slots.of(self.tensor.narrow(self._dim, len(self) - kept, kept).clone(), self._dim)
        return self.narrow(len(self) - kept, kept)

    def rows(self, index: Tensor, row_dim: int) -> Slots:
        return Slots.of(self.tensor.index_select(row_dim, index), self._dim)


@dataclass(frozen=True)
class Cache:
    """What a trunk remembers of `length` slots.

    layers     keys and values [2, B, KV heads, slots, head dim] of each layer; sliding layers may hold only the last slots
    windows    the window of each layer, in keys (None = full attention)
    documents  document of every slot [B, length], -1 = padding; None = one document a row, no padding
    """

    layers: tuple[Slots, ...]
    windows: tuple[int | None, ...]
    length: int
    documents: Slots | None = None

    @property
    def batch(self) -> int:
        return self.layers[0].tensor.shape[1]

    @property
    def device(self) -> torch.device:
        return self.layers[0].tensor.device

    @property
    def bytes(self) -> int:
        return sum(layer.tensor.numel() * layer.tensor.element_size() for layer in self.layers)

    def fork(self) -> Cache:
        """An independent continuation. Attention caches are immutable values, so it shares every tensor."""
        return self

    def crop(self, length: int) -> Cache:
        """The cache as it was after `length` slots.

        Raises ValueError if a sliding layer has already forgotten keys that the next query would need.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} slots to {length}")
        layers = []
        for layer, window in zip(self.layers, self.windows, strict=True):
            first = self.length - len(layer)
            oldest_needed = 0 if window is None else max(0, length - window + 1)
            if first > oldest_needed:
                raise ValueError(f"cannot crop to {length} slots: a sliding layer kept only slots {first} and later (use keep='all')")
            layers.append(layer.narrow(0, length - first))
        documents = None if self.documents is None else self.documents.narrow(0, length)
        return replace(self, layers=tuple(layers), length=length, documents=documents)

    def rollback(self, length: int) -> Cache:
        """`crop` for a cache that is used up by it: later slots are overwritten in place instead of copied when it grows again.

        For drafts and windows that are run, judged and run again. Raises ValueError as `crop` does.
        """
        cropped = self.crop(length)
        gone = self.length - length
        layers = tuple(layer.rollback(len(layer) - gone) for layer in self.layers)
        documents = None if self.documents is None else self.documents.rollback(length)
        return replace(cropped, layers=layers, documents=documents)

    def trim(self) -> Cache:
        """What keep="window" would have kept: sliding layers forget what no later query can see."""
        layers = tuple(k if w is None else k.last(w - 1) for k, w in zip(self.layers, self.windows, strict=True))
        return replace(self, layers=layers)

    def align_right(self, lengths_B: Tensor) -> Cache:
        """Rows of `lengths_B` slots, padded on the right, with their padding moved to the front: their next slots then coincide.

        Raises ValueError if a sliding layer has forgotten keys.
        """
        if any(len(layer) < self.length for layer in self.layers):
            raise ValueError("only a cache that keeps all keys (keep='all') can be aligned")
        source_BS = torch.arange(self.length, device=lengths_B.device)[None] - (self.length - lengths_B)[:, None]
        index = source_BS.clamp(min=0)[None, :, None, :, None]
        layers = tuple(Slots.of(layer.tensor.gather(3, index.expand(layer.tensor.shape)), -2) for layer in self.layers)
        return replace(self, layers=layers, documents=Slots.of(torch.where(source_BS < 0, -1, 0), -1))

    def select(self, rows: Tensor) -> Cache:
        """The given rows [N], in that order; also how beams are reordered and finished rows leave."""
        layers = tuple(layer.rows(rows, row_dim=1) for layer in self.layers)
        documents = None if self.documents is None else self.documents.rows(rows, row_dim=0)
        return replace(self, layers=layers, documents=documents)

    def join(self, others: list[Cache]) -> Cache:
        """The rows of all, padded on the left to one length: their next slots coincide."""
        caches = [self, *others]
        length = max(cache.length for cache in caches)
        layers = tuple(joined([cache.layers[i] for cache in caches], row_dim=1) for i in range(len(self.layers)))
        return replace(self, layers=layers, length=length, documents=joined_documents(caches, length))

    def repeat(self, times: int) -> Cache:
        """Every row `times` times in a row: one prompt, many continuations."""
        device = self.layers[0].tensor.device
        return self.select(torch.arange(self.batch, device=device).repeat_interleave(times))


def joined(parts: list[Slots], row_dim: int) -> Slots:
    """Rows of several views, zeros before the shorter ones. What a sliding layer has forgotten, a window hides."""
    slots = max(len(part) for part in parts)
    padded = [torch.nn.functional.pad(part.tensor, (0, 0, slots - len(part), 0)) for part in parts]
    return Slots.of(torch.cat(padded, dim=row_dim), -2)


def joined_documents(caches: Sequence[_Remembers], length: int) -> Slots:
    rows = []
    for cache in caches:
        known = cache.documents
        own = torch.zeros(cache.batch, cache.length, dtype=torch.long) if known is None else known.tensor
        rows.append(torch.nn.functional.pad(own, (length - cache.length, 0), value=-1))
    device = next((cache.documents.tensor.device for cache in caches if cache.documents is not None), caches[0].device)
    return Slots.of(torch.cat([row.to(device) for row in rows]), -1)


class _Remembers(Protocol):
    """What the caches of all trunks have."""

    @property
    def length(self) -> int: ...

    @property
    def batch(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def documents(self) -> Slots | None: ...


def extend_documents(cache: _Remembers | None, documents_BT: Tensor | None, batch: int, added: int, device: Any) -> Slots | None:
    """Documents of the cached and the new slots; None as long as every row is one unpadded document."""
    past = cache.documents if cache else None
    if documents_BT is None and past is None:
        return None
    if documents_BT is None:
        assert past is not None
        documents_BT = past.tensor[:, -1:].expand(batch, added)  # the document goes on
    if past is None:
        length = cache.length if cache else 0
        past = Slots.of(torch.zeros(batch, length, dtype=torch.long, device=device), -1)
    return past.append(documents_BT)
