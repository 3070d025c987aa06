"""Tokenised text on disk: shards, each two .npy files that are mapped into memory, and the manifest that says what they hold.

    shards.json                  who made them of what (`Manifest`), with the SHA-256 of each file
    train-000000.tokens.npy      uint16 or uint32 [tokens]: whole documents, one after another
    train-000000.ends.npy        int64 [documents]: where each ends, counted from the shard's first token
    validation-000000.…          the held-out documents
    fullband_tokenizer.json, …   the tokenizer: the folder can be named as one

`np.load(file, mmap_mode="r")` opens either.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fullband.data.batch import IGNORE
from fullband.data.packing import Piece
from fullband.data.sources import Cursor
from fullband.data.tasks import Split
from fullband.files import file_hash, read_json, write_json
from fullband.strict import Strict, parse

MANIFEST = "shards.json"
FORMAT = 1
SPLITS: tuple[Split, Split] = ("train", "validation")


class Shard(Strict):
    """What the manifest says of a shard.

    next   the source's cursor after its last document: where the next shard begins
    """

    documents: int
    tokens: int
    tokens_sha256: str
    ends_sha256: str
    next: Cursor


class Manifest(Strict):
    """A folder of shards.

    complete      False until the source is at its end
    tokenizer     name of the tokenizer (`Tokenizer.name`), of which ids are 0..vocab_size-1
    source        the source's fingerprint
    shard_tokens  a shard ends with the document that brings it to so many tokens
    """

    format: int = FORMAT
    complete: bool = False
    tokenizer: str
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    source: dict[str, str]
    shard_tokens: int
    shards: dict[Split, list[Shard]]

    def total(self, split: Split) -> dict[str, int]:
        """{"shards", "documents", "tokens"} of a split."""
        shards = self.shards[split]
        return {"shards": len(shards), "documents": sum(s.documents for s in shards), "tokens": sum(s.tokens for s in shards)}

    @property
    def bytes(self) -> int:
        return sum(self.total(split)["tokens"] * np.dtype(self.dtype).itemsize + self.total(split)["documents"] * 8 for split in SPLITS)

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST, self.model_dump(mode="json"))


def shard_files(folder: Path, split: Split, number: int) -> tuple[Path, Path]:
    """(tokens, ends) of a shard."""
    return folder / f"{split}-{number:06d}.tokens.npy", folder / f"{split}-{number:06d}.ends.npy"


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError naming the folder or its manifest: none there, damaged, of another version."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder}: no tokenised shards there ({MANIFEST} is missing); make them with `fullband tokenize SOURCE -o {folder}`"
        )
    raw = read_json(path)
    if isinstance(raw, dict) and raw.get("format") != FORMAT:
        raise ValueError(f"{path}: must be of format {FORMAT}, got {raw.get('format')}: another version of fullband made it")
    return parse(Manifest, raw, str(path))


def complete_manifest(folder: Path) -> Manifest:
    """`read_manifest`; ValueError for a folder that is not finished."""
    manifest = read_manifest(folder)
    if not manifest.complete:
        found = manifest.total("train")["tokens"]
        raise ValueError(
            f"{folder}: only half written ({found:,} tokens so far); the `fullband tokenize` that began it, run again, finishes it"
        )
    return manifest


def check_hashes(folder: Path, manifest: Manifest) -> Iterator[int]:
    """Hash every file; gives the tokens of each shard that is as it was written. ValueError naming the first that is not, and its hash."""
    for split in SPLITS:
        for number, shard in enumerate(manifest.shards[split]):
            for path, recorded in zip(shard_files(folder, split, number), (shard.tokens_sha256, shard.ends_sha256), strict=True):
                if not path.is_file():
                    raise ValueError(f"{path}: missing, but listed in {MANIFEST}")
                if (found := file_hash(path)) != recorded:
                    raise ValueError(f"{path}: damaged: its SHA-256 is {found}, {MANIFEST} says {recorded}; copy or tokenise it again")
            yield shard.tokens


class StoredTokens:
    """The documents of a split, one after another, as ids 0..tokens-1 of a single sequence. Shards are mapped when first looked into."""

    def __init__(self, folder: Path, split: Split, manifest: Manifest) -> None:
        """ValueError naming the first file that is missing or has another size than it was written with."""
        self._folder, self._split, self._dtype = folder, split, np.dtype(manifest.dtype)
        self._shards = manifest.shards[split]
        self._begins = np.cumsum([0, *(shard.tokens for shard in self._shards)])
        self._maps: dict[Path, np.memmap[Any, Any]] = {}
        self.tokens = int(self._begins[-1])
        self.documents = manifest.total(split)["documents"]
        for number in range(len(self._shards)):
            self._open(number)

    def _open(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, ends) of a shard. ValueError for a file that is gone or was cut: to look into its map would end the process."""
        shard = self._shards[number]
        tokens, ends = shard_files(self._folder, self._split, number)
        return self._map(tokens, self._dtype, shard.tokens), self._map(ends, np.dtype(np.int64), shard.documents)

    def _map(self, path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
        try:
            if path not in self._maps:
                found = np.load(path, mmap_mode="r")
                if found.shape != (count,) or found.dtype != dtype:
                    raise ValueError(f"it holds {found.shape} {found.dtype}")
                self._maps[path] = found
            found = self._maps[path]
            if path.stat().st_size != found.offset + found.nbytes:
                raise ValueError("its size has changed")
        except (OSError, ValueError, EOFError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise ValueError(f"{path}: cannot be read as a shard of {count:,} {dtype} ({reason})") from None
        return found

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Ids start..stop-1, in pieces of one document each. ValueError for a file that is gone."""
        found = []
        while start < stop:
            number = int(np.searchsorted(self._begins, start, side="right")) - 1
            begin = int(self._begins[number])
            tokens, ends = self._open(number)
            at, last = start - begin, min(stop - begin, len(tokens))
            document = int(np.searchsorted(ends, at, side="right"))
            while at < last:
                end = int(ends[document])
                cut = min(end, last)
                found.append(Piece(tokens[at:cut].astype(np.int64), int(tokens[cut]) if cut < end else IGNORE))
                at, document = cut, document + 1
            start = begin + last
        return found

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 [documents]: where each document ends in the sequence."""
        of_shards = [self._open(number)[1] + self._begins[number] for number in range(len(self._shards))]
        return np.concatenate(of_shards) if of_shards else np.zeros(0, np.int64)

    def document(self, number: int) -> np.ndarray:
        """int64 [N]: a whole document."""
        start = int(self.ends[number - 1]) if number else 0
        return np.concatenate([piece.tokens for piece in self.pieces(start, int(self.ends[number]))])
