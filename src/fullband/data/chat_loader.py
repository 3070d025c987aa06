"""Rows of conversations: whole answers, packed or one a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path

from fullband.config import ChatSource, DataConfig
from fullband.data.batch import Batch, Document
from fullband.data.chat import Answer, ChatEncoder, chat_source, chat_template, pack_answers
from fullband.data.chat_template import TEMPLATE_FILE
from fullband.data.loader import SourceLoader
from fullband.data.stream import ItemStream, NoDocumentsError
from fullband.data.tasks import Split
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import newest_of
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
        self._config = source
        self.template = chat_template(source, _folder_of(config.tokenizer))
        self._encoder = ChatEncoder(tokenizer, self.template, config.length)
        self._stream = ItemStream(self.source, self._encoder, seed, config.shuffle_documents)

    def _next_rows(self, first: int, stop: int) -> Batch:
        with self._explained("train"):
            return pack_answers([self._next_row() for _ in range(self.batch_rows)], self.length).rows(first, stop)

    def _next_row(self) -> list[Answer]:
        row: list[Answer] = []
        room = self.length
        while len(answer := self._stream.peek()) <= room and (self._packing or not row):
            row.append(answer)
            room -= len(answer)
            self._stream.skip()
        return row

    def notices(self) -> list[str]:
        """How many of each split's first answers are left out because a row can't hold them. Raises ValueError if all of training's are."""
        found = super().notices()
        kinds: dict[Split, str] = {"train": ""}
        if self._config.dataset or self._config.validation_paths or self._config.validation_fraction:
            kinds["validation"] = "held-out "
        for split, kind in kinds.items():
            texts = [text for _, text in islice(self.source.documents(split), COUNTED)]
            lengths = [len(answer) for text in texts for answer in self._encoder.all_answers(json.loads(text))]
            too_long = [length for length in lengths if length > self.length]
            if split == "train" and len(too_long) == len(lengths) and len(texts) < COUNTED:
                raise ValueError(self._why_nothing(split))
            if too_long:
                found.append(
                    f"{len(too_long)} of {len(lengths)} answers in the first {len(texts)} {kind}conversations "
                    f"are left out: with their prompts they do not fit sequences of {self.length} tokens "
                    f"(data.length); the longest takes {max(too_long):,}"
                )
        return found

    @contextmanager
    def _explained(self, split: Split) -> Iterator[None]:
        try:
            yield
        except NoDocumentsError:
            raise ValueError(self._why_nothing(split)) from None

    def _why_nothing(self, split: Split) -> str:
        """Why a split has no answer to use: all are too long, there is none, or no conversation either."""
        config, where, kind = self._config, self.source.where, "training" if split == "train" else "held-out"
        own = config.validation_split if config.dataset else ", ".join(config.validation_paths)  # else both splits are one's parts
        if own and split == "validation":
            where = f"{where}, split {own}" if config.dataset else own
        lengths = (len(answer) for _, text in self.source.documents(split) for answer in self._encoder.all_answers(json.loads(text)))
        if first := list(islice(lengths, COUNTED)):
            shortest = f"the shortest of the first {len(first)} takes {min(first):,}"
            return f"{where}: no {kind} answer with its prompt fits sequences of {self.length} tokens (data.length); {shortest}"
        if any(True for _ in chat_source(config, keep_all=True).documents(split)):
            return f"{where}: no {kind} conversation has an answer: a message of the assistant after another one"
        return f"{where}: no {kind} conversations in it" + ("" if own else f"; {self.source.holding_out_hint}")

    def fingerprint(self) -> dict[str, str]:
        return super().fingerprint() | {"template": sha256(self.template.source.encode()).hexdigest()[:16]}

    def save(self, folder: Path) -> None:
        super().save(folder)
        write_bytes(folder / TEMPLATE_FILE, self.template.source.encode())

    @cached_property
    def _held_out(self) -> list[Answer]:
        with self._explained("validation"):
            answers = [answer for found in self._encoder.encode_documents(self._held_out_texts()) for answer in found]
            if not answers:
                raise NoDocumentsError
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
    path = newest_of(Path(tokenizer))
    return path if path.is_dir() else path.parent if path.is_file() else None
