"""Prompts of any lengths as one block of slots: padding at the left, so that every row's next token stands in the same slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fullband.layout import NOWHERE, Layout
from fullband.trunk.protocol import Trunk

PADDING = -1  # the document of slots that hold nothing; a prompt is document 0

TokenLists = Sequence[Sequence[int]]


@dataclass(frozen=True)
class AlignedPrompts:
    """B prompts in T slots, T being the longest one's length.

    tokens_BT     ids; 0 in padding
    lengths_B     tokens of each prompt, which is also the position of its first new token
    layout        positions 0, 1, 2, … from each prompt's first token, 0 in padding; documents 0, and -1 in padding. Empty if there is no
                  padding: then no step of decoding needs a mask
    """

    tokens_BT: Tensor
    lengths_B: Tensor
    layout: Layout = NOWHERE

    def padded_right(self) -> AlignedPrompts:
        """The same prompts with their padding moved after them: all begin in slot 0."""
        positions_BT, documents_BT = self.layout.positions_BT, self.layout.documents_BT
        if positions_BT is None or documents_BT is None:
            return self
        slots_T = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)
        source_BT = (slots_T + (len(slots_T) - self.lengths_B)[:, None]) % len(slots_T)
        tokens_BT, positions_BT, documents_BT = (t.gather(1, source_BT) for t in (self.tokens_BT, positions_BT, documents_BT))
        return AlignedPrompts(tokens_BT, self.lengths_B, Layout(positions_BT, documents_BT))

    def select(self, rows: Tensor) -> AlignedPrompts:
        """The given prompts [N], in that order."""
        return AlignedPrompts(self.tokens_BT[rows], self.lengths_B[rows], self.layout[rows])


def align_prompts(trunk: Trunk, prompts: TokenLists | Tensor, mask: Tensor | None = None, cut_to: int | None = None) -> AlignedPrompts:
    """Prompts as lists of ids, or as a LongTensor [B, T] whose real tokens `mask` [B, T] marks (None = all), padded on either side.
    A prompt longer than the context is cut to its last `cut_to` tokens (None = refused).

    Raises ValueError, naming the prompt (counted from 0), if one is empty, longer than the context, holds an id outside the
    vocabulary, or has padding between its tokens.
    """
    rows = _rows_of_lists(prompts, mask) if not isinstance(prompts, Tensor) else _rows_of_tensor(prompts, mask)
    if not rows:
        raise ValueError("no prompts were given")
    if cut_to is not None:
        rows = [row if len(row) <= trunk.context else row[-cut_to:] for row in rows]
    for number, row in enumerate(rows):
        _check(trunk, number, row)
    device = trunk.device
    lengths_B = torch.tensor([len(row) for row in rows])
    longest = int(lengths_B.max())
    tokens_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    for row, tokens in zip(tokens_BT, rows, strict=True):
        row[longest - len(tokens) :] = tokens
    if int(lengths_B.min()) == longest:
        return AlignedPrompts(tokens_BT.to(device), lengths_B.to(device))
    offsets_BT = torch.arange(longest)[None] - (longest - lengths_B)[:, None]  # negative in padding
    documents_BT = torch.where(offsets_BT < 0, PADDING, 0)
    return AlignedPrompts(tokens_BT.to(device), lengths_B.to(device), Layout(offsets_BT.clamp(min=0), documents_BT).to(device))


def _rows_of_lists(prompts: TokenLists, mask: Tensor | None) -> list[Tensor]:
    if mask is not None:
        raise ValueError("a mask belongs to a padded tensor of prompts; lists of ids need none")
    return [torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts]


def _rows_of_tensor(tokens_BT: Tensor, mask_BT: Tensor | None) -> list[Tensor]:
    if tokens_BT.dim() != 2:
        raise ValueError(f"a tensor of prompts has shape [B, T], not {list(tokens_BT.shape)}")
    if mask_BT is None:
        return list(tokens_BT.cpu())
    if mask_BT.shape != tokens_BT.shape:
        raise ValueError(f"the mask has shape {list(mask_BT.shape)}, the prompts {list(tokens_BT.shape)}")
    rows = []
    for number, (tokens, real) in enumerate(zip(tokens_BT.cpu(), mask_BT.cpu().bool(), strict=True)):
        slots = real.nonzero()[:, 0]
        if len(slots) and len(slots) != slots[-1] - slots[0] + 1:
            raise ValueError(f"prompt {number} has padding between its tokens")
        rows.append(tokens[slots])
    return rows


def _check(trunk: Trunk, number: int, tokens: Tensor) -> None:
    if not len(tokens):
        raise ValueError(f"prompt {number} is empty; at least one token is needed")
    if len(tokens) > trunk.context:
        raise ValueError(
            f"prompt {number} has {len(tokens)} tokens and does not fit the model's context of {trunk.context}{trunk.context_note}"
        )
    outside = ((tokens < 0) | (tokens >= trunk.vocab_size)).nonzero()[:, 0]
    if len(outside):
        place = int(outside[0])
        raise ValueError(f"prompt {number}: token id {int(tokens[place])} at position {place} is outside 0..{trunk.vocab_size - 1}")
