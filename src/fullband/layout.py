"""Where the slots of a batch stand: positions, documents, and what stays without feedback, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Slots of B sequences, T each; every part is [B or 1, T], or None where there is nothing to say.

    positions_BT  position in the document; 0 is its start, where nothing is fed back. None = slots count on from the cache
    documents_BT  document of each slot, -1 = padding. None = every sequence is one document without padding
    plain_BT      True where nothing is fed back although a state stands before: a prefix (Eq. 11), the prompt in Soft

    Raises ValueError for documents without positions: nothing would say where they start.
    """

    positions_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    plain_BT: Tensor | None = None

    def __post_init__(self) -> None:
        if self.documents_BT is not None and self.positions_BT is None:
            raise ValueError("documents need positions: position 0 marks the start of each document, where nothing is fed back")

    def __getitem__(self, index: Any) -> Layout:
        """The same part of all three: `layout[:, a:b]` are slots, `layout[rows]` sequences."""
        return Layout(*(None if part is None else part[index] for part in (self.positions_BT, self.documents_BT, self.plain_BT)))

    @property
    def starts_BT(self) -> Tensor | None:
        """Where documents start, as far as positions say so."""
        return None if self.positions_BT is None else self.positions_BT == 0

    def with_plain(self, plain_BT: Tensor | None) -> Layout:
        """This layout with other slots without feedback."""
        return replace(self, plain_BT=plain_BT)

    def to(self, device: Any) -> Layout:
        return Layout(*(None if part is None else part.to(device) for part in (self.positions_BT, self.documents_BT, self.plain_BT)))

    @classmethod
    def of(cls, positions_BT: Tensor, documents_BT: Tensor, plain_BT: Tensor | None = None) -> Layout:
        """The layout of sequences that begin here. Where each is one document without padding it says nothing of documents, so that
        attention needs no mask."""
        single = not bool((documents_BT != documents_BT[:, :1]).any() or (documents_BT < 0).any())
        return cls(positions_BT, None if single else documents_BT, plain_BT)


NOWHERE = Layout()  # sequences of one document each, slots counted from the cache


def plain_slots(layout: Layout, begins: bool, length: int, device: Any) -> Tensor | None:
    """True where nothing is fed back, bool [B or 1, T]: document starts, `plain_BT`, and the first slot of sequences that begin here."""
    parts = [part for part in (layout.starts_BT, layout.plain_BT) if part is not None]
    if begins:
        parts.append(torch.arange(length, device=device)[None] == 0)
    if not parts:
        return None
    found = parts[0]
    for part in parts[1:]:
        found = found | part
    return found
