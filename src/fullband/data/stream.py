"""The endless stream of training data: documents shuffled block by block, with a small exact state.

A block is read in source order, then permuted by a key of (seed, epoch, block). The state is where the block starts in the source and
how far the stream is in it, so a resumed run reads one block again, skips to its document, and tokenises from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from fullband.data.batch import IGNORE
from fullband.data.packing import Piece
from fullband.data.sources import START, Cursor, TextSource

Parts = TypeVar("Parts", bound="Sequence[Any] | np.ndarray")
Made = TypeVar("Made", bound="Sequence[Any] | np.ndarray", covariant=True)

BLOCK_CHARACTERS = 16_000_000  # a block also ends after this much text, whatever its number of documents: it is held in memory
GROUP_CHARACTERS = 1_000_000  # text tokenised at once
GROUP_DOCUMENTS = 256


class NoDocumentsError(ValueError):
    """A split has no documents, or none that gives a part."""


class Encoder(Protocol[Made]):
    """Makes parts of texts: a document's tokens, or the answers of a conversation."""

    def encode_documents(self, texts: Sequence[str]) -> Sequence[Made]: ...


class DocumentStream(Generic[Parts]):
    """The parts of a source's training documents, epoch after epoch.

    State: epoch; block (number in the epoch) and cursor (its first document in the source); index (document in the permuted block);
    offset (part of that document).
    """

    def __init__(self, source: TextSource, encoder: Encoder[Parts], seed: int, block_documents: int) -> None:
        self._source, self._encoder, self._seed, self._block_documents = source, encoder, seed, block_documents
        self.load_state_dict({"epoch": 0, "block": 0, "cursor": list(START), "index": 0, "offset": 0})

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "block": self._block,
            "cursor": list(self._cursor),
            "index": self._index,
            "offset": self._offset,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._block = int(state["epoch"]), int(state["block"])
        self._index, self._offset = int(state["index"]), int(state["offset"])
        self._cursor: Cursor = (int(state["cursor"][0]), int(state["cursor"][1]))
        self._reader: Iterator[tuple[Cursor, str]] = self._source.documents("train", self._cursor)
        self._texts: list[str] | None = None  # of the block, permuted; None until it is read
        self._group: dict[int, Parts] = {}  # parts of the documents at hand, by index
        self._is_fruitful = True  # whether this epoch or the one before gave any part

    def _advance(self, count: int, document: Parts) -> None:
        """Leave the next `count` parts of `document`, in which the stream is, behind."""
        self._is_fruitful |= count > 0
        self._offset += count
        if self._offset == len(document):
            self._index, self._offset = self._index + 1, 0

    def _document(self) -> Parts:
        """Parts of the document the stream is in. NoDocumentsError if the source has no training text, ValueError if it can't be read."""
        texts = self._read_block() if self._texts is None else self._texts
        while self._index >= len(texts):
            texts = self._next_block(bool(texts))
        if self._index not in self._group:
            self._encode(texts)
        return self._group[self._index]

    def _encode(self, texts: list[str]) -> None:
        stop, characters = self._index, 0
        while stop < len(texts) and characters < GROUP_CHARACTERS and stop - self._index < GROUP_DOCUMENTS:
            characters += len(texts[stop])
            stop += 1
        documents = self._encoder.encode_documents(texts[self._index : stop])
        self._group = dict(enumerate(documents, start=self._index))

    def _next_block(self, was_read: bool) -> list[str]:
        if was_read:
            self._block += 1
        else:  # the source is at its end
            if not self._is_fruitful:
                raise NoDocumentsError(f"{self._source.where}: no training documents in it; {self._source.holding_out_hint}")
            self._epoch, self._block, self._is_fruitful = self._epoch + 1, 0, False
            self._reader = self._source.documents("train")
        self._index = self._offset = 0
        return self._read_block()

    def _read_block(self) -> list[str]:
        """Read, and permute, the block that begins where the reader is; empty at the source's end."""
        texts: list[str] = []
        characters = 0
        while len(texts) < self._block_documents and characters < BLOCK_CHARACTERS:
            cursor, text = next(self._reader, (None, ""))
            if cursor is None:
                break
            if not texts:
                self._cursor = cursor
            texts.append(text)
            characters += len(text)
        key = np.random.SeedSequence([self._seed, self._epoch, self._block])
        order = np.random.Generator(np.random.Philox(key)).permutation(len(texts))
        self._texts, self._group = [texts[i] for i in order], {}
        return self._texts


class TokenizedStream(DocumentStream[np.ndarray]):
    """Tokens."""

    def take(self, count: int) -> list[Piece]:
        """The next `count` tokens, in pieces of documents. ValueError as `_document`."""
        pieces = []
        while count:
            piece = self.take_piece(count)
            pieces.append(piece)
            count -= len(piece.tokens)
        return pieces

    def take_piece(self, most: int) -> Piece:
        """The next tokens of one document, at most `most`. ValueError as `_document`."""
        while not len(tokens := self._document()):
            self._advance(0, tokens)
        stop = min(self._offset + most, len(tokens))
        follow = int(tokens[stop]) if stop < len(tokens) else IGNORE
        piece = Piece(tokens[self._offset : stop], follow)
        self._advance(stop - self._offset, tokens)
        return piece


class ItemStream(DocumentStream[Sequence[Any]]):
    """Items that are not cut: the answers of conversations."""

    def peek(self) -> Any:
        """The next item, which `skip` leaves behind. ValueError as `_document`."""
        while True:
            document = self._document()
            if len(document):
                return document[self._offset]
            self._advance(0, document)

    def skip(self) -> None:
        self._advance(1, self._document())
