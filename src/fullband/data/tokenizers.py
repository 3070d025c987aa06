"""The tokenizers that there are: bytes, words of programs, names of a task's elements, and others' (`subword`), by name or path."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fullband.data.subword import HuggingFaceTokenizer, TiktokenTokenizer
from fullband.data.tokenizer import SAVED_AS, BytesOfIds, TokenDecoder, Tokenizer
from fullband.run_folder import CHECKPOINTS, newest_checkpoint

_PIECES = re.compile(r" ?[^\W\d_]+|[0-9]{1,3}| ?[^\s\w]+|\s|\w")
_WORDS = [
    *("required", "completed", "scratch", "state", "query", "Status", "Value", "r"),
    *(" r", " final", " state", " more", " done", " zero", " one"),
    *(" =", " +=", " ^=", ":", "#"),
    *map(str, range(10, 100)),
]


class ByteTokenizer(BytesOfIds):
    """UTF-8 bytes (ids 0..255) and an end of document (256)."""

    name = "bytes"
    vocab_size = 257
    end_of_document = 256
    stops = frozenset({256})

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def bytes_of(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        raw = (text.encode("utf-8", errors="replace") for text in texts)
        return [np.append(np.frombuffer(data, dtype=np.uint8).astype(np.int64), self.end_of_document) for data in raw]

    def description(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class ProgramTokenizer(BytesOfIds):
    """Bytes (ids 0..255), an end of document (256), and the words of `program_text`; other text is written in bytes.

    It cuts text where the paper's tokenizer (cl100k) does, so App. F's inputs have the paper's token counts: letters with the space before
    them, signs with the space before them, numbers of up to three digits, single newlines.
    """

    name = "program"
    end_of_document = 256
    stops = frozenset({256})
    vocab_size = 257 + len(_WORDS)

    def __init__(self) -> None:
        self._ids = {word: 257 + number for number, word in enumerate(_WORDS)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            known = self._ids.get(piece)
            ids += piece.encode("utf-8", errors="replace") if known is None else [known]
        return ids

    def bytes_of(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return _WORDS[token - 257].encode() if 257 <= token < self.vocab_size else b""

    def description(self) -> dict[str, Any]:
        return {"kind": "program"}


class TaskTokenizer(Tokenizer):
    """Names of a task's operations and states, separated by spaces: "3 1 4". It has no end of document."""

    end_of_document = None
    stops: frozenset[int] = frozenset()

    def __init__(self, task: str, names: Sequence[str]) -> None:
        self.name = f"task:{task}"
        self.names = list(names)
        self.vocab_size = len(self.names)
        self._ids = {name: number for number, name in enumerate(self.names)}

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            if word not in self._ids:
                known = " ".join(self.names[:8]) + (" ..." if len(self.names) > 8 else "")
                raise ValueError(f"'{word}' is not a token of {self.name}; write its tokens ({known}) with spaces between them")
        return [self._ids[word] for word in words]

    def stream(self, before: Sequence[int] = ()) -> TokenDecoder:
        return TokenDecoder(self)  # the space that separates it from its prompt is no part of an answer

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.names[token] for token in ids if 0 <= token < self.vocab_size)

    def description(self) -> dict[str, Any]:
        return {"kind": "task", "task": self.name.removeprefix("task:"), "names": self.names}


def load_tokenizer(name: str | Path) -> Tokenizer:
    """A tokenizer by name ("bytes", "program", "tiktoken:cl100k_base") or path (tokenizer.json, its folder, a model folder or a run's).

    Raises ValueError for a name or path that isn't one, and for files that can't be read.
    """
    text = os.path.expanduser(name)
    path = newest_of(Path(text))
    if text == "bytes":
        return ByteTokenizer()
    if text == "program":
        return ProgramTokenizer()
    if text.startswith("tiktoken:"):
        return TiktokenTokenizer(text.removeprefix("tiktoken:"))
    if (path / SAVED_AS).is_file():
        return _described(_read_json(path / SAVED_AS), path)
    if (path / "tokenizer.json").is_file():
        return HuggingFaceTokenizer(path / "tokenizer.json")
    if path.is_file():
        return HuggingFaceTokenizer(path)
    if path.is_dir():
        raise ValueError(f"{path}: no tokenizer in this folder (neither {SAVED_AS} nor tokenizer.json)")
    raise ValueError(f"{text}: no such tokenizer; give bytes, program, tiktoken:NAME, or the path of a tokenizer.json or of its folder")


def newest_of(folder: Path) -> Path:
    """The newest checkpoint of a run folder; of anything else, itself."""
    return newest_checkpoint(folder / CHECKPOINTS) or folder


def _described(description: dict[str, Any], folder: Path) -> Tokenizer:
    try:
        kind = description["kind"]
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "program":
            return ProgramTokenizer()
        if kind == "task":
            return TaskTokenizer(description["task"], description["names"])
        if kind == "tiktoken":
            return TiktokenTokenizer(description["name"])
        if kind == "huggingface":
            stops = description["stops"]
            return HuggingFaceTokenizer(folder / "tokenizer.json", description["end_of_document"], frozenset(stops))
    except (KeyError, TypeError):
        kind = None
    raise ValueError(f"{folder / SAVED_AS}: not a tokenizer description this version can read (kind {kind})")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({' '.join(str(error).split())}); write or download it again") from None
