"""What a tokenizer is: text to ids and back. `save` puts one into a model folder, from which `tokenizers.load_tokenizer` loads it.

`encode` adds nothing: its ids can stand anywhere. `begin` is for a text that stands at the beginning of a row (a prompt, a document, a
rendered conversation): it puts the tokenizer's own beginning of sequence before it, once, also where the text has it written out. So a
document is its beginning, its ids and one end-of-document id; only the tokenizer knows which of the two marks it has. Special
tokens written out in a text ("<|endoftext|>") become their ids, which is what a chat prompt needs.
Ids that stand for no text (padding of the vocabulary, the byte tokenizer's end of document) decode to nothing.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SAVED_AS = "fullband_tokenizer.json"
BEFORE = 8  # ids that say how the next one is decoded: whether a word stands there
LONGEST_CHARACTER = 4  # bytes of UTF-8


class Tokenizer(ABC):
    """What the rest of the library knows of a tokenizer.

    name             the same for equal tokenizers, different for different ones
    vocab_size       ids are 0..vocab_size-1
    end_of_document  id that ends every document, or None if the tokenizer has none
    stops            ids at which generation ends (end_of_document, and a chat tokenizer's end of turn)
    special          ids that are marks, not text
    threads          that `encode_documents` may use
    lead             ids that its makers put before every text (a beginning of sequence): what `begin` adds and `encode` does not
    """

    name: str
    vocab_size: int
    end_of_document: int | None
    stops: frozenset[int]
    special: frozenset[int] = frozenset()
    lead: tuple[int, ...] = ()
    threads = 4

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text; adds nothing before or after it."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """What `load_tokenizer` needs to make this tokenizer again, as JSON."""

    def begin(self, text: str) -> list[int]:
        """Ids of a text at the beginning of a row: `lead` stands before it once, whether or not the text has it written out."""
        return self._begun(self.encode(text))

    def follow(self, before: str, text: str) -> list[int]:
        """Ids of `text` after `before`. Some tokenizers put a space before the first word that they encode: not before this one."""
        for context in (before, "\n"):  # the line break: for a token that would span the border, which is a border for the model too
            head, whole = self.encode(context), self.encode(context + text)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        return self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int64 [N] per text, `lead` and end of document included."""
        return [self._ended(self.begin(text)) for text in texts]

    def stream(self, before: Sequence[int] = ()) -> TokenDecoder:
        """A decoder for ids that arrive one by one after the ids `before`."""
        return TokenDecoder(self, before)

    def decode_behind(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text that `ids` add after the ids `before`, with the space that decoding them alone may lose."""
        return self.stream(before).whole(ids)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a model folder."""
        text = json.dumps(self.description(), indent=2, ensure_ascii=False)
        (Path(folder) / SAVED_AS).write_text(text + "\n", encoding="utf-8")

    def _begun(self, ids: list[int]) -> list[int]:
        return ids if tuple(ids[: len(self.lead)]) == self.lead else [*self.lead, *ids]

    def _ended(self, ids: Sequence[int]) -> np.ndarray:
        return np.array(ids if self.end_of_document is None else [*ids, self.end_of_document], dtype=np.int64)


class TokenDecoder:
    """Streaming decoder: `push` returns the characters that became whole, `finish` what is left (U+FFFD for broken bytes).

    All that is returned, joined, is what the ids add to the text of those `before`. Decoding only a window of ids keeps the cost per token
    constant; the window keeps the ids of the last text given out, because some tokenizers drop the space before the first word they decode.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        lead = len(tokenizer.lead)
        text = list(before)[lead if tuple(before[:lead]) == tokenizer.lead else 0 :]  # a beginning of sequence is no text to come after
        self._window, self._context, self._given = self._behind(text[-BEFORE - LONGEST_CHARACTER :])

    def _behind(self, ids: list[int]) -> tuple[list[int], int, str]:
        """(the ids to decode new ones with, how many of them are whole characters, the text of those, which is out already).

        Both ends matter: a byte fallback makes nothing but U+FFFD of bytes in a row that begin or end inside a character."""
        for unfinished in range(min(LONGEST_CHARACTER, len(ids) + 1)):  # bytes of a character that the ids leave unfinished
            for first in range(max(0, len(ids) - BEFORE - LONGEST_CHARACTER), max(1, len(ids) - BEFORE + 1)):
                whole = ids[first : len(ids) - unfinished]
                text = self._tokenizer.decode(whole)
                if not whole or (text.strip("\ufffd") == text):
                    return ids[first:], len(whole), text if whole else ""
        window = ids[-BEFORE:]
        return window, len(window), self._tokenizer.decode(window).rstrip("\ufffd")

    def push(self, token: int) -> str:
        self._window.append(token)
        added = self._added()
        new = added.rstrip("\ufffd")  # the last bytes may be the beginning of a character
        self._given += new
        if new and new == added:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._given = self._tokenizer.decode(self._window)
        return new

    def finish(self) -> str:
        """The rest, U+FFFD for broken bytes."""
        return self.whole(())

    def whole(self, ids: Sequence[int]) -> str:
        """What these ids and those before them still add: the last ones."""
        self._window += ids
        rest = self._added()
        self._window, self._given, self._context = [], "", 0
        return rest

    def _added(self) -> str:
        text = self._tokenizer.decode(self._window)
        if text.startswith(self._given):
            return text[len(self._given) :]
        # Of bytes that are not UTF-8 a byte fallback makes U+FFFD, and of the whole characters in bytes before them, too: those are out.
        self._window, self._given, self._context = self._window[self._context :], "", 0
        return self._tokenizer.decode(self._window)


class ByteStream(TokenDecoder):
    """Streaming decoder of tokenizers that know the bytes of every id: exact, and constant work per id."""

    def __init__(self, tokenizer: BytesOfIds, before: Sequence[int] = ()) -> None:
        super().__init__(tokenizer)
        self._bytes_of = tokenizer.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(self._bytes_of, before[-LONGEST_CHARACTER:])))  # which may end inside a character

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def whole(self, ids: Sequence[int]) -> str:
        rest = self._decoder.decode(b"".join(map(self._bytes_of, ids)), final=True)
        self._decoder.reset()
        return rest


class BytesOfIds(Tokenizer):
    """A tokenizer whose ids are byte strings."""

    @abstractmethod
    def bytes_of(self, token: int) -> bytes:
        """Bytes of one id; empty for an id without text."""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.bytes_of(token) for token in ids).decode("utf-8", errors="replace")

    def stream(self, before: Sequence[int] = ()) -> TokenDecoder:
        return ByteStream(self, before)
