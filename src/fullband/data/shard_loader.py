"""Training on shards: the sequences of a weighted mixture, each found by its number, read ahead by a thread.

The sequences ("rows") of an epoch of a folder are the windows of `length` tokens of all its documents one after another, each a piece
of one document or several. So every token is an input once, a document that is longer than a row goes on in another one, and the windows
begin somewhere else in every epoch. Which row comes when is computed from (seed, folder, epoch, number), not stored: no rank or thread
has to have seen what came before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np

from fullband.config import DataConfig, ShardsSource
from fullband.data.batch import Batch, Document
from fullband.data.loader import Loader
from fullband.data.packing import Piece, as_document, in_rows
from fullband.data.shards import SPLITS, StoredTokens, check_hashes, complete_manifest
from fullband.data.stream import NoDocumentsError
from fullband.data.tokenizer import Tokenizer

AHEAD = 4  # batches that are read before they are asked for
HASHED = 2**30  # bytes of shards up to which every file is hashed when a run starts
ROUNDS = 4


def keyed(bits: int, *key: object) -> int:
    """A number below 2**bits that the key decides."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=16).digest(), "big") & ((1 << bits) - 1)


def shuffled(number: int, count: int, *key: object) -> int:
    """Where a random permutation of 0..count-1, which the key decides, puts `number`.

    A Feistel network over the next even number of bits, walked until it falls below `count` (Black and Rogaway 2002): a permutation of any
    size without a table.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    while True:
        left, right = number >> half, number & ((1 << half) - 1)
        for turn in range(ROUNDS):
            left, right = right, left ^ keyed(half, *key, turn, right)
        number = left << half | right
        if number < count:
            return number


class Rows:
    """The rows of one folder's split, `count` an epoch.

    seed   of the order; None = as they stand, in every epoch
    """

    def __init__(self, stored: StoredTokens, length: int, packing: bool, seed: tuple[int, int] | None = None) -> None:
        self._stored, self._length, self._seed = stored, length, seed
        self._last_rows: np.ndarray | None = None  # [documents]: rows up to each document's end, where a row holds one document
        self.count = -(-stored.tokens // length)
        if not packing:
            self._last_rows = np.cumsum(-(-np.diff(stored.ends, prepend=0) // length))
            self.count = int(self._last_rows[-1]) if stored.documents else 0

    def pieces(self, number: int) -> list[Piece]:
        """Row `number` of the run. ValueError for a file that is gone."""
        epoch, row = divmod(number, self.count)
        first, total = 0, self._stored.tokens
        if self._seed is not None:
            row = shuffled(row, self.count, *self._seed, epoch)
            first = keyed(64, *self._seed, epoch, "begin") % total
        if self._last_rows is not None:
            document = int(np.searchsorted(self._last_rows, row, side="right"))
            end = int(self._stored.ends[document])
            start = int(self._stored.ends[document - 1]) if document else 0
            start += (row - (int(self._last_rows[document - 1]) if document else 0)) * self._length
            return self._stored.pieces(start, min(start + self._length, end))
        start = (first + row * self._length) % total  # the last window of an epoch ends where its first began
        stop = start + min(self._length, total - row * self._length)
        return self._stored.pieces(start, min(stop, total)) + self._stored.pieces(0, max(0, stop - total))


class ShardLoader(Loader):
    """Rows of folders that `tokenize` wrote.

    Global row i is a pure function of the recipe's `data` and its seed. Batch b holds rows b·batch_rows and on; rank r of `world` reads its
    consecutive part of each batch, and nothing else: the order is the same for any number of ranks. The folder whose share lags most
    behind its weight gives the next row, so at any row each has had its share to within one row for each other folder.

    State: the number of rows handed out, and of each folder's rows among them.
    """

    def __init__(
        self, config: DataConfig, source: ShardsSource, tokenizer: Tokenizer, seed: int, batch_rows: int, rank: int = 0, world: int = 1
    ) -> None:
        """ValueError naming the folder or file that is missing, half written, damaged, or of another tokenizer or version."""
        super().__init__(tokenizer, config.length, batch_rows, rank, world)
        self._config, self._source = config, source
        self._folders = [Path(folder) for folder in source.folders]
        self._manifests = [complete_manifest(folder) for folder in self._folders]
        for folder, manifest in zip(self._folders, self._manifests, strict=True):
            if manifest.tokenizer != tokenizer.name:
                raise ValueError(
                    f"{folder}: holds ids of the tokenizer {manifest.tokenizer}, the recipe or its model has {tokenizer.name} "
                    "(data.tokenizer); tokenise the text with that one"
                )
        self._stored = {
            split: [StoredTokens(folder, split, made) for folder, made in zip(self._folders, self._manifests, strict=True)]
            for split in SPLITS
        }
        self._is_hashed = sum(manifest.bytes for manifest in self._manifests) <= HASHED
        if self._is_hashed:
            for folder, manifest in zip(self._folders, self._manifests, strict=True):
                for _ in check_hashes(folder, manifest):
                    pass
        shuffles = config.shuffle_documents > 1
        self._rows = [
            Rows(stored, config.length, config.packing, (seed, number) if shuffles else None)
            for number, stored in enumerate(self._stored["train"])
        ]
        for folder, rows in zip(self._folders, self._rows, strict=True):
            if not rows.count:
                raise NoDocumentsError(f"{folder}: no training documents in it; tokenise it with a smaller part held out")
        weights = source.weights or [rows.count for rows in self._rows]
        self._weights = [weight / sum(weights) for weight in weights]
        self._thread = ThreadPoolExecutor(1, "shards")
        self.load_state_dict({"row": 0, "taken": [0] * len(self._folders)})

    def _next_rows(self, first: int, stop: int) -> Batch:
        while len(self._ahead) < AHEAD:
            numbers = self._plan(self.batch_rows)[first:stop]
            self._ahead.append((self._thread.submit(self._read, numbers), (self._planned, tuple(self._taken))))
        batch = self._ahead[0][0].result()  # what fails stays in the queue, and the state where it was
        _, self._state = self._ahead.popleft()
        return batch

    def _plan(self, count: int) -> list[tuple[int, int]]:
        """(folder, number of its row) of the next rows."""
        plan = []
        for _ in range(count):
            self._planned += 1
            behind = [weight * self._planned - taken for weight, taken in zip(self._weights, self._taken, strict=True)]
            folder = behind.index(max(behind))
            plan.append((folder, self._taken[folder]))
            self._taken[folder] += 1
        return plan

    def _read(self, plan: Sequence[tuple[int, int]]) -> Batch:
        return in_rows([self._rows[folder].pieces(number) for folder, number in plan], self.length).validate(self.vocab_size)

    def state_dict(self) -> dict[str, Any]:
        return {"row": self._state[0], "taken": list(self._state[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._planned, self._taken = int(state["row"]), [int(taken) for taken in state["taken"]]
        if sum(self._taken) != self._planned or len(self._taken) != len(self._folders):
            raise KeyError("taken")
        self._state = (self._planned, tuple(self._taken))
        self._ahead: deque[tuple[Future[Batch], tuple[int, tuple[int, ...]]]] = deque()

    def fingerprint(self) -> dict[str, str]:
        made = [manifest.model_dump_json(include={"tokenizer", "shards"}) for manifest in self._manifests]
        words = {
            "source": f"{len(made)} folders of shards, weights {', '.join(f'{weight:.6g}' for weight in self._weights)}",
            "files": f"sha256 {sha256(''.join(made).encode()).hexdigest()[:16]}",
            "tokenizer": self.tokenizer.name,
            "length": str(self.length),
            "shuffle": "sequences" if self._config.shuffle_documents > 1 else "none",
        }
        return words | ({} if self._config.packing else {"packing": "one document a row"})

    def notices(self) -> list[str]:
        if self._is_hashed:
            return []
        return ["the shards' sizes were checked and not their hashes; fullband tokenize FOLDER --check does that"]

    def _validation(self, rows: int, length: int) -> Batch:
        """Rows spread over all that the folders hold out."""
        held_out = [Rows(stored, length, self._config.packing) for stored in self._stored["validation"]]
        places = [(folder, row) for folder, found in enumerate(held_out) for row in _spread(found.count, rows)]
        if not places:
            raise NoDocumentsError(
                f"{', '.join(map(str, self._folders))}: no documents are held out; tokenise with some, or set evaluation.rows=0"
            )
        chosen = [places[number] for number in _spread(len(places), rows)]
        return in_rows([held_out[folder].pieces(row) for folder, row in chosen], length)

    @cached_property
    def _held_out_order(self) -> list[tuple[int, int]]:
        """(folder, document) of the held-out documents, in one fixed order that mixes them."""
        counts = [stored.documents for stored in self._stored["validation"]]
        places = [(folder, document) for folder, count in enumerate(counts) for document in range(count)]
        return [places[number] for number in np.random.Generator(np.random.Philox(0)).permutation(len(places))]

    def validation_documents(self, limit: int) -> list[Document]:
        return [as_document(self._stored["validation"][folder].document(n)) for folder, n in self._held_out_order[:limit]]


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of 0..count-1, evenly."""
    return list(range(count)) if count <= most else [int(at) for at in np.linspace(0, count - 1, most)]
