"""The cache of a Hugging Face trunk: an immutable value, handed to transformers one call at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from fullband.trunk.cache import Slots, joined_documents
from fullband.trunk.huggingface.layers import AttentionLayer, AttentionPast, RecurrentPast

LayerPast = AttentionPast | RecurrentPast


@dataclass(frozen=True)
class HuggingFaceCache:
    """What the trunk remembers of `length` slots, of all its layers or of a part of them. See `protocol.Cache`.

    layers     the past of each layer of the part
    documents  document of every slot [B, length], -1 = padding; None = one document a row, no padding
    first      the layer of the stack, counted from 0, that the part begins with
    stack      empty pasts of all layers
    """

    layers: tuple[LayerPast, ...]
    length: int = 0
    documents: Slots | None = None
    first: int = 0
    stack: tuple[LayerPast, ...] = ()

    @classmethod
    def empty(cls, config: Any) -> HuggingFaceCache:
        """The cache of a model that has run nothing. Raises ValueError for kinds of layers that cannot be forked."""
        if "chunked_attention" in get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]:
            raise ValueError("it attends within chunks of the text, which this cache has no masks for")
        stack = tuple(_past(layer) for layer in DynamicCache(config=config).layers)
        return cls(stack, stack=stack)

    def part(self, first: int, last: int) -> HuggingFaceCache:
        """An empty cache for layers first + 1 … last."""
        return replace(self, layers=self.stack[first:last], first=first)

    @property
    def whole(self) -> list[LayerPast]:
        """A past for every layer of the stack. Layers of other parts are not run; theirs only tell transformers how long the past is."""
        return [
            self.layers[i - self.first] if 0 <= i - self.first < len(self.layers) else self._stand_in(i) for i in range(len(self.stack))
        ]

    def _stand_in(self, layer: int) -> LayerPast:
        empty = self.stack[layer]
        if isinstance(empty, RecurrentPast):
            return empty
        alike = (past for past in self.layers if isinstance(past, AttentionPast) and past.window == empty.window)
        return next(alike, replace(empty, length=self.length))

    @property
    def recurrent(self) -> bool:
        return any(isinstance(layer, RecurrentPast) for layer in self.layers)

    @property
    def batch(self) -> int:
        return self.layers[0].tensors[0].shape[0]

    @property
    def device(self) -> torch.device:
        return self.layers[0].tensors[0].device

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer.tensors)

    def lend(self) -> TransformersCache:
        """A transformers cache to attend to and extend; this one stays as it is."""
        return TransformersCache(layers=[AttentionLayer(p) if isinstance(p, AttentionPast) else p.layer() for p in self.whole])

    def take_back(self, lent: Any, added: int, documents: Slots | None, trim: bool) -> HuggingFaceCache:
        """This cache and the `added` slots that a lent one has gained since."""
        padded_B = None if documents is None else documents.tensor[:, -1] < 0
        own = lent.layers[self.first : self.first + len(self.layers)]
        layers = tuple(
            past.after(layer, padded_B) if isinstance(past, RecurrentPast) else layer.past
            for past, layer in zip(self.layers, own, strict=True)
        )
        cache = replace(self, layers=layers, length=self.length + added, documents=documents)
        return cache.trim() if trim else cache

    def join(self, others: list[HuggingFaceCache]) -> HuggingFaceCache:
        """The rows of all, padded on the left to one length."""
        caches: list[Any] = [self, *others]
        length = max(cache.length for cache in caches)
        layers = tuple(layer.join([other.layers[i] for other in others], length) for i, layer in enumerate(self.layers))  # type: ignore[misc]
        return replace(self, layers=layers, length=length, documents=joined_documents(caches, length))

    def fork(self) -> HuggingFaceCache:
        """An independent continuation: recurrent states are cloned when they are lent, everything else is immutable."""
        return self

    def crop(self, length: int) -> HuggingFaceCache:
        """The cache as it was after `length` slots. Raises ValueError if keys are forgotten or a layer is recurrent."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} slots to {length}")
        documents = None if self.documents is None else self.documents.narrow(0, length)
        return replace(self, layers=tuple(layer.crop(length) for layer in self.layers), length=length, documents=documents)

    def rollback(self, length: int) -> HuggingFaceCache:
        """`crop` for a cache that is used up by it: later slots are overwritten in place when it grows again. ValueError as `crop`."""
        cropped = self.crop(length)
        documents = None if self.documents is None else self.documents.rollback(length)
        return replace(cropped, layers=tuple(layer.rollback(length) for layer in self.layers), documents=documents)

    def trim(self) -> HuggingFaceCache:
        """What keep="window" would have kept."""
        return replace(self, layers=tuple(layer.trim() for layer in self.layers))

    def align_right(self, lengths_B: Tensor) -> HuggingFaceCache:
        """Rows padded on the right, with their padding moved to the front. Raises ValueError as `crop` does."""
        source_BS = torch.arange(self.length, device=lengths_B.device)[None] - (self.length - lengths_B)[:, None]
        layers = tuple(layer.gather(source_BS.clamp(min=0)) for layer in self.layers)
        return replace(self, layers=layers, documents=Slots.of(torch.where(source_BS < 0, -1, 0), -1))

    def select(self, rows: Tensor) -> HuggingFaceCache:
        """The given rows [N], in that order."""
        documents = None if self.documents is None else self.documents.rows(rows, row_dim=0)
        return replace(self, layers=tuple(layer.select(rows) for layer in self.layers), documents=documents)

    def repeat(self, times: int) -> HuggingFaceCache:
        """Every row `times` times in a row."""
        return self.select(torch.arange(self.batch, device=self.layers[0].tensors[0].device).repeat_interleave(times))


def _past(layer: Any) -> LayerPast:
    if type(layer) is DynamicLayer:
        return AttentionPast(0, None)
    if type(layer) is DynamicSlidingWindowLayer:
        return AttentionPast(0, layer.sliding_window)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return RecurrentPast(layer)
    raise ValueError(f"its cache has layers of a kind that cannot be forked ({type(layer).__name__})")
