"""The tokens of every row so far, kept on the device for those who look back: logit processors, repetition penalty, sliding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1  # in the slots before a shorter row


@dataclass(frozen=True)
class TextSoFar:
    """What a logit processor knows of the rows whose logits it is given.

    rows_N     their numbers: sample s of prompt i is row i·n + s
    tokens_NT  prompt and new tokens, aligned at the end; -1 before a shorter row. Not to be written to
    made       new tokens of each row so far
    """

    rows_N: Tensor
    tokens_NT: Tensor
    made: int


class History:
    """Tokens [N, T] and, where asked for, which of the vocabulary have occurred [N, V]. A step is one write, whatever N and T."""

    def __init__(self, tokens_NT: Tensor, room: int, vocab_size: int | None = None):
        """The prompts (-1 = padding at the left) with space for `room` more tokens; `vocab_size` None = no record of what occurred."""
        rows, self._length = tokens_NT.shape
        self._buffer = torch.nn.functional.pad(tokens_NT, (0, room), value=NO_TOKEN)
        self.seen_NV: Tensor | None = None
        if vocab_size is not None:
            seen = torch.zeros(rows, vocab_size + 1, dtype=torch.bool, device=tokens_NT.device)  # the last column takes the padding
            seen.scatter_(1, tokens_NT.where(tokens_NT >= 0, vocab_size), True)
            self.seen_NV = seen[:, :-1].contiguous()

    @property
    def tokens_NT(self) -> Tensor:
        return self._buffer[:, : self._length]

    def append(self, tokens_N: Tensor) -> None:
        self._buffer[:, self._length] = tokens_N
        self._length += 1
        if self.seen_NV is not None:
            self.seen_NV.scatter_(1, tokens_N[:, None], True)

    def select(self, rows_N: Tensor) -> None:
        """Only the given rows stay."""
        self._buffer = self._buffer[rows_N]
        self.seen_NV = None if self.seen_NV is None else self.seen_NV[rows_N]
