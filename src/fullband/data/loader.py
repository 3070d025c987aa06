"""Loaders: the batches of a run, in an order that knows nothing of ranks, with a small exact state.

Every rank gets its own consecutive rows of the same global batch, so the data of a run do not depend on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullband.data.batch import Batch, Document
from fullband.data.packing import as_document, in_rows, pack, pack_documents, pieces_of
from fullband.data.sources import TextSource
from fullband.data.stream import DocumentStream, NoDocumentsError, TokenizedStream
from fullband.data.tasks import Task
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import TaskTokenizer

VALIDATION_CHARACTERS = 4_000_000  # held-out text that is looked at, at most
VALIDATION_DOCUMENTS = 4096


class Loader(ABC):
    """Batches of `batch_rows` global rows of `length` positions, of which this rank (of `world`) gets its share.

    `next_batch` goes on for ever. After `load_state_dict(state_dict())` in another process the following batches are the same, bit for
    bit, whatever the number of ranks.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, batch_rows: int, rank: int = 0, world: int = 1) -> None:
        if batch_rows % world:
            raise ValueError(f"batch_rows ({batch_rows}) must be a multiple of the number of processes ({world})")
        self.tokenizer = tokenizer
        self.length = length
        self.batch_rows = batch_rows
        self._rows_of_rank = (rank * batch_rows // world, (rank + 1) * batch_rows // world)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def next_batch(self) -> Batch:
        """This rank's rows of the next global batch [batch_rows / world, T]. ValueError for data that can't be read."""
        return self._next_rows(*self._rows_of_rank)

    @abstractmethod
    def _next_rows(self, first: int, stop: int) -> Batch:
        """Rows first..stop-1 of the next global batch."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: a few numbers, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """What decides the data, in words; a resumed run must find the same."""

    def notices(self) -> list[str]:
        """What a reader of the recipe might not expect of its data, in words. Raises ValueError for data that can't be read or used."""
        return []

    def save(self, folder: Path) -> None:
        """Write into a model folder what turns its ids into text and back."""
        self.tokenizer.save(folder)

    @abstractmethod
    def _validation(self, rows: int, length: int) -> Batch: ...

    @abstractmethod
    def validation_documents(self, limit: int) -> list[Document]:
        """Up to `limit` whole held-out documents, the same at every call; a smaller limit gives the first of them."""

    def validation_batches(self, rows: int, batch_rows: int, length: int | None = None) -> list[Batch]:
        """Up to `rows` held-out rows of `length` positions (default: the training length) in batches; the same at every call and rank.

        Raises ValueError if nothing is held out.
        """
        return self._validation(rows, length or self.length).split(batch_rows)


class TaskLoader(Loader):
    """Examples of a built-in task, numbered from 0 in each split."""

    def __init__(self, task: Task, length: int, seed: int, batch_rows: int, rank: int = 0, world: int = 1) -> None:
        super().__init__(TaskTokenizer(task.name, task.names), length, batch_rows, rank, world)
        self.task = task
        self.seed = seed
        self._example = 0

    def _next_rows(self, first: int, stop: int) -> Batch:
        batch = self.task.examples(self.seed, "train", self._example, self.batch_rows, self.length)
        self._example += self.batch_rows
        return batch.rows(first, stop)

    def state_dict(self) -> dict[str, Any]:
        return {"example": self._example}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._example = int(state["example"])

    def fingerprint(self) -> dict[str, str]:
        return {"source": self.task.name, "tokenizer": self.tokenizer.name, "length": str(self.length)}

    def _validation(self, rows: int, length: int) -> Batch:
        return self.task.examples(self.seed, "validation", 0, rows, length)

    def validation_documents(self, limit: int) -> list[Document]:
        batch = self._validation(limit, self.length)
        return [Document(tokens, targets) for tokens, targets in zip(batch.tokens, batch.targets, strict=True)]


class SourceLoader(Loader):
    """Rows made of the documents of a source, which a stream brings in order."""

    source: TextSource
    _stream: DocumentStream[Any]
    _shuffle_documents: int
    _packing: bool

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)

    def notices(self) -> list[str]:
        return self.source.notices()

    def fingerprint(self) -> dict[str, str]:
        row = {"tokenizer": self.tokenizer.name, "length": str(self.length), "shuffle": str(self._shuffle_documents)}
        return self.source.fingerprint() | row | ({} if self._packing else {"packing": "one document a row"})

    def _held_out_texts(self) -> list[str]:
        """Held-out documents, in an order that mixes the source's files. Raises NoDocumentsError if there are none."""
        texts: list[str] = []
        characters = 0
        for _, text in self.source.documents("validation"):
            texts.append(text)
            characters += len(text)
            if len(texts) >= VALIDATION_DOCUMENTS or characters >= VALIDATION_CHARACTERS:
                break
        if not texts:
            if next(iter(self.source.documents("train")), None) is None:
                raise NoDocumentsError(f"{self.source.where}: holds no text")
            raise NoDocumentsError(f"{self.source.where}: no documents are held out for validation; {self.source.holding_out_hint}")
        # One fixed order, whatever the run's seed: runs with different seeds are compared on the same text.
        order = np.random.Generator(np.random.Philox(0)).permutation(len(texts))
        return [texts[i] for i in order]

    def _validation(self, rows: int, length: int) -> Batch:
        packed = self._held_out_rows(length)
        if rows >= packed.shape[0]:
            return packed
        # Rows spread over all held-out text: the first ones alone could be a single long document.
        return packed.select(torch.from_numpy(np.linspace(0, packed.shape[0] - 1, rows).astype(np.int64)))

    @abstractmethod
    def _held_out_rows(self, length: int) -> Batch: ...


class TextLoader(SourceLoader):
    """Rows of a text source: packed, or of one document each."""

    _stream: TokenizedStream

    def __init__(
        self,
        source: TextSource,
        tokenizer: Tokenizer,
        length: int,
        seed: int,
        batch_rows: int,
        shuffle_documents: int = 1024,
        rank: int = 0,
        world: int = 1,
        packing: bool = True,
    ) -> None:
        super().__init__(tokenizer, length, batch_rows, rank, world)
        self.source, self._packing = source, packing
        self._shuffle_documents = shuffle_documents
        self._stream = TokenizedStream(source, tokenizer, seed, shuffle_documents)

    def _next_rows(self, first: int, stop: int) -> Batch:
        if self._packing:
            return pack(self._stream.take(self.batch_rows * self.length), self.length).rows(first, stop)
        return in_rows([[self._stream.take_piece(self.length)] for _ in range(self.batch_rows)], self.length).rows(first, stop)

    @cached_property
    def _held_out(self) -> list[np.ndarray]:
        return self.tokenizer.encode_documents(self._held_out_texts())

    def _held_out_rows(self, length: int) -> Batch:
        if self._packing:
            return pack_documents(self._held_out, length)
        return in_rows([[piece] for tokens in self._held_out for piece in pieces_of(tokens, length)], length)

    def validation_documents(self, limit: int) -> list[Document]:
        return [as_document(tokens) for tokens in self._held_out[:limit]]
