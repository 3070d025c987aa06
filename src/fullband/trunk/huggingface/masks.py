"""Masks for rows with padding or several documents. transformers isolates documents only where there is no cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullband.trunk.huggingface.cache import HuggingFaceCache
from fullband.trunk.huggingface.layers import AttentionPast


def is_packed(documents_BS: Tensor) -> bool:
    """Whether a row holds more than one document besides padding (-1)."""
    held_BS = documents_BS >= 0
    first_B1 = documents_BS.masked_fill(~held_BS, torch.iinfo(documents_BS.dtype).max).amin(dim=1, keepdim=True)
    return bool((held_BS & (documents_BS != first_B1)).any())


def document_masks(
    cache: HuggingFaceCache, documents_BS: Tensor, added: int, layer_types: list[str], attention: str, dtype: torch.dtype
) -> Any:
    """Masks [B, 1, added, keys] for the last `added` slots, as the attention implementation takes them: one, or a dict with one for each
    layer type if they differ. A query sees the keys of its own document up to itself, as many as the layer's window holds; padding is a
    document like others, so that no query sees nothing at all.
    """
    masks: dict[str, Tensor] = {}
    for layer, kind in zip(cache.whole, layer_types, strict=True):
        assert isinstance(layer, AttentionPast)
        if kind not in masks:
            seen = _seen(layer, documents_BS, added)
            masks[kind] = seen if attention == "sdpa" else torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _seen(layer: AttentionPast, documents_BS: Tensor, added: int) -> Tensor:
    """True [B, 1, added, keys] where a query sees a key."""
    keys = layer.held + added
    documents_BK = documents_BS[:, documents_BS.shape[1] - keys :]
    slots_K = torch.arange(keys, device=documents_BS.device)
    age_QK = slots_K[keys - added :, None] - slots_K
    within_QK = age_QK >= 0 if layer.window is None else (age_QK >= 0) & (age_QK < layer.window)
    return (within_QK & (documents_BK[:, keys - added :, None] == documents_BK[:, None]))[:, None]
