"""What transformers' inputs say about the rows: positions and documents, as the rest of fullband counts them."""

from __future__ import annotations

import torch
from torch import Tensor

from fullband.data.batch import IGNORE, PADDING
from fullband.layout import NOWHERE, Layout


def describe_rows(tokens_BT: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Layout:
    """The layout of rows that begin here; empty where every row is one unpadded document.

    attention_mask   [B, T], 0 = padding, before or after a row's tokens
    position_ids     [B or 1, T]; every 0 on a token starts a document, as packed and padding-free batches are written; the first of a row
                     may begin further on
    Raises ValueError for other shapes, for padding between tokens, and for positions that neither go on by one nor start at 0.
    """
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.shape != tokens_BT.shape):
        given = f"shape {list(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else f"type {type(attention_mask).__name__}"
        raise ValueError(f"attention_mask has {given}, the tokens {list(tokens_BT.shape)}: give a 2-D mask with one entry a token")
    held_BT = None if attention_mask is None or bool(attention_mask.bool().all()) else attention_mask.bool()
    if held_BT is not None:
        _refuse_holes(held_BT)
    if position_ids is None:
        if held_BT is None:
            return NOWHERE
        return Layout((held_BT.long().cumsum(dim=1) - 1).clamp(min=0), torch.where(held_BT, 0, PADDING))
    if position_ids.dim() != 2 or position_ids.shape[1] != tokens_BT.shape[1] or position_ids.shape[0] not in (1, tokens_BT.shape[0]):
        raise ValueError(
            f"position_ids has shape {list(position_ids.shape)}, the tokens {list(tokens_BT.shape)}: give one position a token"
        )
    positions_BT = position_ids.expand(tokens_BT.shape)
    real_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if held_BT is None else held_BT
    _refuse_jumps(positions_BT, real_BT)
    first_BT = real_BT & (real_BT.long().cumsum(dim=1) == 1)
    starts_BT = first_BT | (real_BT & (positions_BT == 0))
    documents_BT = (starts_BT.long().cumsum(dim=1) - 1).masked_fill(~real_BT, PADDING)
    if held_BT is None and not bool(documents_BT.any()):
        return Layout(positions_BT, documents_BT if bool((positions_BT[:, 0] != 0).any()) else None)
    return Layout(positions_BT, documents_BT)


def _refuse_holes(held_BT: Tensor) -> None:
    """A masked token between others would hand its state on to the next."""
    runs_B = held_BT[:, 0].long() + (held_BT[:, 1:] & ~held_BT[:, :-1]).sum(dim=1)
    if bool((runs_B > 1).any()):
        row = int((runs_B > 1).nonzero()[0])
        raise ValueError(f"attention_mask: row {row} has padding between its tokens; with latent feedback it stands before or after them")


def _refuse_jumps(positions_BT: Tensor, real_BT: Tensor) -> None:
    """Nothing would say whether a position that jumps goes on in the document before, whose state is fed back, or starts another."""
    before_BT, here_BT = positions_BT[:, :-1], positions_BT[:, 1:]
    jumps_BT = (here_BT != before_BT + 1) & (here_BT != 0) & real_BT[:, 1:] & real_BT[:, :-1]
    negative_BT = (positions_BT < 0) & real_BT
    if bool(negative_BT.any()) or bool(jumps_BT.any()):
        row, slot = (negative_BT if bool(negative_BT.any()) else torch.nn.functional.pad(jumps_BT, (1, 0))).nonzero()[0].tolist()
        after = f" after {int(positions_BT[row, slot - 1])}" if slot else ""
        raise ValueError(
            f"position_ids: row {row} has {int(positions_BT[row, slot])}{after}; with latent feedback positions go on by one, and every "
            "further document of a row starts at 0"
        )


def shifted_targets(labels_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
    """transformers' labels (the token itself) as targets (the token wanted next), IGNORE where the next one is another document's."""
    targets_BT = torch.full_like(labels_BT, IGNORE)
    targets_BT[:, :-1] = labels_BT[:, 1:]
    if documents_BT is not None:
        targets_BT[:, :-1].masked_fill_(documents_BT[:, 1:] != documents_BT[:, :-1], IGNORE)
    return targets_BT
