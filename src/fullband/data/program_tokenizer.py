"""A word-level tokenizer for program-like text. It cuts text where the paper's tokenizer (cl100k) does, so App. F's inputs have the paper's
token counts: letters with the space before them, signs with the space before them, numbers of up to three digits, single newlines."""

from __future__ import annotations

import re
from typing import Any

from fullband.data.tokenizers import BytesOfIds

_PIECES = re.compile(r" ?[^\W\d_]+|[0-9]{1,3}| ?[^\s\w]+|\s|\w")
_WORDS = [
    *("required", "completed", "scratch", "state", "query", "Status", "Value", "r"),
    *(" r", " final", " state", " more", " done", " zero", " one"),
    *(" =", " +=", " ^=", ":", "#"),
    *map(str, range(10, 100)),
]


class ProgramTokenizer(BytesOfIds):
    """Bytes (ids 0..255), an end of document (256), and the words of `program_text`; other text is written in bytes."""

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
