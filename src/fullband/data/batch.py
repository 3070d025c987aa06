"""A batch: what every loader hands to training and evaluation, whatever the data was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fullband.layout import Layout

IGNORE = -100  # a target that no loss counts (torch's own convention)
PADDING = -1  # the document id of a position that holds nothing


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents; LongTensors [B, T], and a mask for chat data.

    tokens     input ids; 0 where padded
    targets    the id wanted at each position, IGNORE (-100) where nothing is
    positions  0, 1, 2, ... restarting at every document start
    documents  ids >= 0 that increase along a row, and -1 on padding; nothing may cross from one id to another (law 5)
    plain      bool [B, T], False on the answers' tokens, which later passes fuse, True on prompts and padding; None where the data
               have no answers
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor
    plain: Tensor | None = None

    def __post_init__(self) -> None:
        shapes = {name: tuple(value.shape) for name, value in vars(self).items() if value is not None}
        if len(set(shapes.values())) != 1 or self.tokens.dim() != 2:
            raise ValueError(f"tensors of a batch must have one shape [B, T], got {shapes}")

    @property
    def shape(self) -> tuple[int, int]:
        """(rows B, positions T)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def layout(self) -> Layout:
        """Where the positions stand; prompts of chat data are without feedback."""
        return Layout.of(self.positions, self.documents, self.plain)

    @property
    def counted(self) -> int:
        """Positions that have a target: the denominator of the loss."""
        return int((self.targets != IGNORE).sum())

    def to(self, device: torch.device | str) -> Batch:
        return self._each(lambda value: value.to(device, non_blocking=True))

    def rows(self, start: int, stop: int) -> Batch:
        """Rows start..stop-1, as views."""
        return self._each(lambda value: value[start:stop])

    def select(self, rows: Tensor) -> Batch:
        """The given rows, in that order."""
        return self._each(lambda value: value[rows])

    def split(self, microbatch_rows: int) -> list[Batch]:
        """Consecutive pieces of `microbatch_rows` rows; the last may be smaller."""
        return [self.rows(start, start + microbatch_rows) for start in range(0, self.shape[0], microbatch_rows)]

    def validate(self, vocab_size: int) -> Batch:
        """Return itself; ValueError naming the first token or target id outside 0..vocab_size-1, with its row and position."""
        for what, ids_BT, allowed_BT in (
            ("token", self.tokens, torch.zeros_like(self.tokens, dtype=torch.bool)),
            ("target", self.targets, self.targets == IGNORE),
        ):
            wrong_BT = ((ids_BT < 0) | (ids_BT >= vocab_size)) & ~allowed_BT
            if bool(wrong_BT.any()):
                row, position = wrong_BT.nonzero()[0].tolist()
                raise ValueError(
                    f"{what} id {int(ids_BT[row, position])} in row {row} at position {position} is outside the vocabulary "
                    f"(0..{vocab_size - 1}); the data was made with another tokenizer than the model's"
                )
        return self

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        plain = None if self.plain is None else change(self.plain)
        return Batch(change(self.tokens), change(self.targets), change(self.positions), change(self.documents), plain)


@dataclass(frozen=True)
class Document:
    """One whole held-out document, for losses with a standard error over documents: two LongTensors [T], and `Batch.plain` of it."""

    tokens: Tensor
    targets: Tensor
    plain: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def stack(documents: Sequence[Document]) -> Batch:
    """One document a row, padded on the right to the longest."""
    if not documents:
        raise ValueError("no documents to stack")
    length = max(len(document) for document in documents)
    rows, shape = range(len(documents)), (len(documents), length)
    tokens_BT, positions_BT = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    targets_BT, documents_BT = torch.full(shape, IGNORE), torch.full(shape, PADDING)
    plain_BT = None if all(document.plain is None for document in documents) else torch.ones(shape, dtype=torch.bool)
    for row, document in zip(rows, documents, strict=True):
        size = len(document)
        tokens_BT[row, :size], targets_BT[row, :size] = document.tokens, document.targets
        positions_BT[row, :size], documents_BT[row, :size] = torch.arange(size), 0
        if plain_BT is not None:
            plain_BT[row, :size] = False if document.plain is None else document.plain
    return Batch(tokens_BT, targets_BT, positions_BT, documents_BT, plain_BT)
