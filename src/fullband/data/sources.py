"""Text sources: documents in a fixed order, each with a cursor from which reading can go on.

A cursor is (file, record): which file of the source, and which record (line, row, piece) in it. Whether a document is held out is a
function of its cursor, so it is the same in every epoch and after every resume, and no document is in both splits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

from fullband.data.tasks import Split

Cursor = tuple[int, int]
START: Cursor = (0, 0)

# Any fixed salt is as fair as another. With this one, a single file of a dozen documents and a dozen files of one document each
# already hold one out at 1%, so a small corpus has something to validate on.
_SALT = "fullband-131"
FEWEST = 500  # characters of a held-out end, unless that were more than a quarter
_HASH_WHOLE = 256 * 2**20  # bytes of data up to which a fingerprint reads everything; beyond, the ends of each file
_HASH_ENDS = 2**20


class TextSource(ABC):
    """Documents of a training and a validation split.

    where             what to call the source in a message
    holding_out_hint  how to get held-out documents, or more training documents
    """

    where: str
    holding_out_hint: str

    @abstractmethod
    def documents(self, split: Split, start: Cursor = START) -> Iterator[tuple[Cursor, str]]:
        """Documents of a split from cursor `start` on; blank ones are left out. ValueError for whatever can't be read."""

    def notices(self) -> list[str]:
        """What one might not expect of the splits, in words. ValueError for whatever can't be read."""
        return []

    def progress(self) -> float | None:
        """How much of the split that is being read has been read, 0 to 1; None where that is not known."""
        return None

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """What decides the documents, as words that differ when the documents do."""


def held_out(cursor: Cursor, fraction: float) -> bool:
    """Whether the document at `cursor` belongs to validation."""
    digest = blake2b(f"{_SALT}:{cursor[0]}:{cursor[1]}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


@dataclass(frozen=True)
class HeldOutEnd:
    """Where the held-out end of a small source begins: at `character` of the document at `cursor`."""

    cursor: Cursor
    character: int
    characters: int
    of: int

    def part_of(self, split: Split, cursor: Cursor, text: str) -> str:
        """What of a document is in a split; may be empty."""
        begins = len(text) if cursor < self.cursor else self.character if cursor == self.cursor else 0
        return text[:begins] if split == "train" else text[begins:]

    def __str__(self) -> str:
        return f"{self.characters:,} of {self.of:,} characters"


def held_out_end(documents: Sequence[tuple[Cursor, str]], fraction: float, may_cut: bool) -> HeldOutEnd | None:
    """The last `fraction` of some documents' characters, FEWEST of them or a quarter at least; None if nothing is left to train on.

    may_cut   whether it may begin inside a document: then at a line or a word, if there is one in it
    """
    total = sum(len(text) for _, text in documents)
    rest = max(int(fraction * total), min(FEWEST, total // 4), 1)
    after = 0  # characters after this document
    for place in reversed(range(len(documents))):
        cursor, text = documents[place]
        first = place == 0
        if after + len(text) >= rest or first:
            begins = _cut(text, len(text) - (rest - after), keep_first=first) if may_cut else 0
            if first and not begins:  # all of it would be held out
                break
            return HeldOutEnd(cursor, begins, after + len(text) - begins, total)
        after += len(text)
    if len(documents) < 2:
        return None
    return HeldOutEnd(documents[1][0], 0, total - len(documents[0][1]), total)


def _cut(text: str, wanted: int, keep_first: bool) -> int:
    """A place near character `wanted` with text on both sides (before it only if `keep_first`); 0 if there is none."""
    for place in (text.rfind("\n", 0, wanted) + 1, text.rfind(" ", 0, wanted) + 1, wanted):
        if text[place:].strip() and (text[:place].strip() or not keep_first):
            return place
    return 0


def fingerprint_files(files: list[Path]) -> str:
    """Number, names, sizes and contents of files (of each file's ends where they are large), in a few words."""
    total = sum(file.stat().st_size for file in files)
    digest = sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if total <= _HASH_WHOLE or size <= 2 * _HASH_ENDS:
                while part := stream.read(_HASH_ENDS):
                    digest.update(part)
            else:
                digest.update(stream.read(_HASH_ENDS))
                stream.seek(-_HASH_ENDS, 2)
                digest.update(stream.read(_HASH_ENDS))
    return f"{len(files)} files, {total} bytes, sha256 {digest.hexdigest()[:16]}"
