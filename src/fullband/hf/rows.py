"""What transformers' inputs say about the rows: positions and documents, as the rest of fullband counts them."""

from __future__ import annotations

import torch
from torch import Tensor

from fullband.data.batch import IGNORE, PADDING


def describe_rows(
    tokens_BT: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """(positions [B, T], documents [B, T]) of rows that begin here; both None where every row is one unpadded document.

    attention_mask   [B, T], 0 = padding, on either side
    position_ids     [B or 1, T]; every 0 on a token starts a document (how packed and padding-free batches are written)
    Raises ValueError for masks of another shape.
    """
    if attention_mask is not None and tuple(attention_mask.shape) != tuple(tokens_BT.shape):
        shapes = f"{list(attention_mask.shape)}, the tokens {list(tokens_BT.shape)}"
        raise ValueError(f"attention_mask has shape {shapes}: give a 2-D mask with one entry a token")
    held_BT = None if attention_mask is None or bool(attention_mask.bool().all()) else attention_mask.bool()
    if position_ids is None:
        if held_BT is None:
            return None, None
        return (held_BT.long().cumsum(dim=1) - 1).clamp(min=0), torch.where(held_BT, 0, PADDING)
    positions_BT = position_ids.expand(tokens_BT.shape)
    starts_BT = positions_BT == 0 if held_BT is None else (positions_BT == 0) & held_BT
    documents_BT = (starts_BT.long().cumsum(dim=1) - 1).clamp(min=0)
    if held_BT is not None:
        documents_BT = documents_BT.masked_fill(~held_BT, PADDING)
    elif not bool(documents_BT.any()):
        return positions_BT, torch.zeros_like(documents_BT) if bool((positions_BT[:, 0] != 0).any()) else None
    return positions_BT, documents_BT


def shifted_targets(labels_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
    """transformers' labels (the token itself) as targets (the token wanted next), IGNORE where the next one is another document's."""
    targets_BT = torch.full_like(labels_BT, IGNORE)
    targets_BT[:, :-1] = labels_BT[:, 1:]
    if documents_BT is not None:
        targets_BT[:, :-1].masked_fill_(documents_BT[:, 1:] != documents_BT[:, :-1], IGNORE)
    return targets_BT
