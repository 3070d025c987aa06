"""Documents into rows of T positions, every token used once as an input.

The target of a token is the next token of its document. A document's last token (its end-of-document token) has none: nothing
crosses a boundary. A document that does not fit continues in the next row as a fresh document there (positions restart, nothing is
carried over), but the last target before the cut is still the true next token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fullband.data.batch import IGNORE, PADDING, Batch, Document


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document, int64 [N], and the token that follows them in it (IGNORE at its end)."""

    tokens: np.ndarray
    follow: int = IGNORE

    def targets(self) -> np.ndarray:
        return np.append(self.tokens[1:], self.follow)


def pack(pieces: Iterable[Piece], length: int) -> Batch:
    """Rows [B, length] that hold the pieces one after another; the end of the last row is padded if they don't fill it."""
    filled = [piece for piece in pieces if len(piece.tokens)]
    if not filled:
        raise ValueError("nothing to pack: the documents hold no tokens")
    sizes_P = np.array([len(piece.tokens) for piece in filled])
    count = int(sizes_P.sum())
    rows = -(-count // length)

    def folded(values_N: np.ndarray, padding: int) -> np.ndarray:
        padded = np.full(rows * length, padding, dtype=np.int64)
        padded[:count] = values_N
        return padded.reshape(rows, length)

    tokens_BT = folded(np.concatenate([piece.tokens for piece in filled]), 0)
    targets_BT = folded(np.concatenate([piece.targets() for piece in filled]), IGNORE)
    starts_N = np.zeros(count, dtype=np.int64)
    starts_N[np.cumsum(sizes_P)[:-1]] = 1  # where a piece starts inside the stream; a row's first position starts one anyhow
    starts_BT = folded(starts_N, 0)
    starts_BT[:, 0] = 1
    columns_T = np.arange(length)
    positions_BT = columns_T - np.maximum.accumulate(starts_BT * columns_T, axis=1)
    documents_BT = np.cumsum(starts_BT, axis=1) - 1
    empty = (np.arange(rows * length) >= count).reshape(rows, length)
    positions_BT[empty], documents_BT[empty] = 0, PADDING
    return Batch(*(torch.from_numpy(values_BT) for values_BT in (tokens_BT, targets_BT, positions_BT, documents_BT)))


def pack_documents(documents: Sequence[np.ndarray], length: int) -> Batch:
    """Whole documents, each int64 [N] with its end-of-document token, into rows [B, length]."""
    return pack([Piece(tokens) for tokens in documents], length)


def pieces_of(tokens: np.ndarray, length: int) -> list[Piece]:
    """A document, int64 [N], in pieces of at most `length` tokens."""
    cuts = range(0, len(tokens), length)
    return [Piece(tokens[at : at + length], int(tokens[at + length]) if at + length < len(tokens) else IGNORE) for at in cuts]


def in_rows(rows_of: Iterable[Sequence[Piece]], length: int) -> Batch:
    """Rows [B, length] of the pieces given for each, at most `length` tokens of them, padded on the right."""
    rows = [pack(pieces, length) for pieces in rows_of]
    return Batch(*(torch.cat(parts) for parts in zip(*((r.tokens, r.targets, r.positions, r.documents) for r in rows), strict=True)))


def as_document(tokens: np.ndarray) -> Document:
    """A whole document on its own, with its next-token targets."""
    return Document(torch.from_numpy(tokens), torch.from_numpy(Piece(tokens).targets()))
