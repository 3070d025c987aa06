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

from fullband.trunk.cache import Slots
from fullband.trunk.huggingface.layers import AttentionLayer, AttentionPast, RecurrentPast

LayerPast = AttentionPast | RecurrentPast


@dataclass(frozen=True)
class HuggingFaceCache:
    """What the trunk remembers of `length` slots; the same operations as `trunk.cache.Cache`.

    layers     the past of each layer
    documents  document of every slot [B, length], -1 = padding; None = one document a row, no padding
    """

    layers: tuple[LayerPast, ...]
    length: int = 0
    documents: Slots | None = None

    @classmethod
    def empty(cls, config: Any) -> HuggingFaceCache:
        """The cache of a model that has read nothing. Raises ValueError for kinds of layers that cannot be forked."""
        if "chunked_attention" in get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]:
            raise ValueError("it attends within chunks of the text, which this cache has no masks for")
        return cls(tuple(_past(layer) for layer in DynamicCache(config=config).layers))

    @property
    def recurrent(self) -> bool:
        return any(isinstance(layer, RecurrentPast) for layer in self.layers)

    @property
    def batch(self) -> int:
        return self.layers[0].tensors[0].shape[0]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer.tensors)

    def lend(self) -> TransformersCache:
        """A transformers cache to read from and extend; this one stays as it is."""
        return TransformersCache(layers=[AttentionLayer(p) if isinstance(p, AttentionPast) else p.layer() for p in self.layers])

    def take_back(self, lent: Any, added: int, documents: Slots | None, trim: bool) -> HuggingFaceCache:
        """This cache and the `added` slots that a lent one has read since."""
        padded_B = None if documents is None else documents.tensor[:, -1] < 0
        layers = tuple(
            past.read(layer, padded_B) if isinstance(past, RecurrentPast) else layer.past
            for past, layer in zip(self.layers, lent.layers, strict=True)
        )
        cache = HuggingFaceCache(layers, self.length + added, documents)
        return cache.trim() if trim else cache

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
        """Rows padded behind, with their padding moved to the front. Raises ValueError as `crop` does."""
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
