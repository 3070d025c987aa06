"""Rows of conversations: whole answers, packed or one a row."""

from __future__ import annotations

import json
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path

from fullband.config import ChatSource, DataConfig
from fullband.data.batch import Batch, Document
from fullband.data.chat import Answer, ChatEncoder, chat_source, chat_template, pack_answers
from fullband.data.chat_template import TEMPLATE_FILE
from fullband.data.loader import SourceLoader
from fullband.data.stream import ItemStream
from fullband.data.tokenizers import Tokenizer
from fullband.files import write_bytes

COUNTED = 256  # conversations that are looked at for answers that are too long


class ChatLoader(SourceLoader):
    """Answers of conversations in the order of the stream, as many in a row as fit whole; see `data.chat`."""

    _stream: ItemStream

    def __init__(
        self, config: DataConfig, source: ChatSource, tokenizer: Tokenizer, seed: int, batch_rows: int, rank: int = 0, world: int = 1
    ) -> None:
        """Raises ValueError for missing files, packages, data sets and templates."""
        super().__init__(tokenizer, config.length, batch_rows, rank, world)
        self.source, self._packing, self._shuffle_documents = chat_source(source), config.packing, config.shuffle_documents
        self.template = chat_template(source, _folder_of(config.tokenizer))
        self._encoder = ChatEncoder(tokenizer, self.template, config.length)
        self._stream = ItemStream(self.source, self._encoder, seed, config.shuffle_documents)

    def _next_global_batch(self) -> Batch:
        return pack_answers([self._next_row() for _ in range(self.batch_rows)], self.length)

    def _next_row(self) -> list[Answer]:
        row: list[Answer] = []
        room = self.length
        while len(answer := self._stream.peek()) <= room and (self._packing or not row):
            row.append(answer)
            room -= len(answer)
            self._stream.skip()
        return row

    def notices(self) -> list[str]:
        """How many of the first answers are left out because a row can't hold them."""
        texts = [text for _, text in islice(self.source.documents("train"), COUNTED)]
        answers = [answer for text in texts for answer in self._encoder.all_answers(json.loads(text))]
        if not (too_long := [len(answer) for answer in answers if not self._encoder.fits(answer)]):
            return []
        return [
            f"{len(too_long)} of {len(answers)} answers in the first {len(texts)} conversations are left out: with their prompts they do "
            f"not fit rows of {self.length} tokens (data.length); the longest takes {max(too_long):,}"
        ]

    def fingerprint(self) -> dict[str, str]:
        return super().fingerprint() | {"template": sha256(self.template.source.encode()).hexdigest()[:16]}

    def save(self, folder: Path) -> None:
        super().save(folder)
        write_bytes(folder / TEMPLATE_FILE, self.template.source.encode())

    @cached_property
    def _held_out(self) -> list[Answer]:
        answers = [answer for found in self._encoder.encode_documents(self._held_out_texts()) for answer in found]
        if not answers:
            raise ValueError(f"{self.source.where}: no held-out answer fits rows of {self.length} tokens (data.length)")
        return answers

    def _held_out_rows(self, length: int) -> Batch:
        rows: list[list[Answer]] = [[]]
        room = length
        for answer in (answer for answer in self._held_out if len(answer) <= length):
            if len(answer) > room or (rows[-1] and not self._packing):
                rows.append([])
                room = length
            rows[-1].append(answer)
            room -= len(answer)
        return pack_answers(rows, length)

    def validation_documents(self, limit: int) -> list[Document]:
        return [answer.document() for answer in self._held_out[:limit]]


def _folder_of(tokenizer: str) -> Path | None:
    """Where a tokenizer's own template would be."""
    path = Path(tokenizer)
    return path if path.is_dir() else path.parent if path.is_file() else None
