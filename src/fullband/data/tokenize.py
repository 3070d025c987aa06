"""Text sources into shards: several processes tokenise, one reads and writes in the source's order.

So the shards depend on the source alone, not on the number of processes or on where a run was killed: what the manifest lists stays, and
the next run goes on after it. A single reader keeps about ten processes busy; more text than that: one folder for each part of the files.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from threading import Thread

import numpy as np

from fullband.config import ChatSource, DataConfig, ShardsSource, TaskSource
from fullband.data.build import build_source
from fullband.data.shards import MANIFEST, SPLITS, Manifest, Shard, read_manifest, shard_files
from fullband.data.sources import START, Cursor, TextSource
from fullband.data.tasks import Split
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import load_tokenizer
from fullband.files import alone_in, check_place, write_bytes

SHARD_TOKENS = 2**24
CHUNK_CHARACTERS = 2**18  # text that a process gets at a time
AHEAD = 4  # chunks that wait for each process

Watch = Callable[[str, int, "float | None"], None]
"""(what is done: a split, tokens of it so far, the part of it that has been read, if that is known)"""


def tokenize(
    config: DataConfig, folder: Path, jobs: int | None = None, shard_tokens: int = SHARD_TOKENS, watch: Watch = lambda *_: None
) -> tuple[Manifest, int]:
    """Write the documents of a recipe's `data` into `folder`: all of them, or what an earlier run left to do.

    jobs   processes that tokenise; None = one for each core

    Returns (the manifest, how many tokens were there before). Raises ValueError for data that are no text or can't be read, a folder that
    holds something else, that another process is writing or that can't be written, and a process that dies. What was finished stays.
    """
    if isinstance(config.source, (ChatSource, TaskSource, ShardsSource)):
        raise ValueError(f"data.source.kind: must be text to tokenise (files, huggingface, …), got {config.source.kind}")
    source = build_source(config.source)
    tokenizer = load_tokenizer("bytes" if config.tokenizer == "auto" else config.tokenizer)
    check_place(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        manifest = _begin(folder, source, tokenizer, shard_tokens)
        before = sum(manifest.total(split)["tokens"] for split in SPLITS)
        if not manifest.complete:
            try:
                with _processes(tokenizer, jobs or available_cores()) as pool:
                    for split in SPLITS:
                        _write_split(folder, split, manifest, source, pool, watch)
            except (OSError, BrokenProcessPool) as error:
                reason = (
                    "a process that tokenises has died: out of memory, or killed" if isinstance(error, BrokenProcessPool) else _named(error)
                )
                raise ValueError(f"{reason}; the same command goes on after the shards that are finished") from None
            manifest = manifest.model_copy(update={"complete": True})
            manifest.write(folder)
    return manifest, before


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _named(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _begin(folder: Path, source: TextSource, tokenizer: Tokenizer, shard_tokens: int) -> Manifest:
    """The folder's manifest, which must be of the same source and tokenizer, or a new one."""
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    new = Manifest(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,  # type: ignore[arg-type]
        source=source.fingerprint(),
        shard_tokens=shard_tokens,
        shards={"train": [], "validation": []},
    )
    if not (folder / MANIFEST).is_file():
        if any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ValueError(f"{folder}: holds other files and no shards; choose another folder")
        new.write(folder)
    found = read_manifest(folder)
    for key, before in found.model_dump(exclude={"shards", "complete"}).items():
        if (now := getattr(new, key)) != before:
            raise ValueError(
                f"{folder}: was begun with another {key.replace('_', ' ')} ({before} there, {now} here); choose another folder"
            )
    tokenizer.save(folder)
    return found


def _write_split(folder: Path, split: Split, manifest: Manifest, source: TextSource, pool: Pool, watch: Watch) -> None:
    """The shards of a split that are still to come."""
    shards, held = manifest.shards[split], 0
    parts: list[np.ndarray] = []
    after: Cursor = shards[-1].next if shards else START
    done = manifest.total(split)["tokens"]
    watch(split, done, None)

    def write() -> None:
        files = shard_files(folder, split, len(shards))
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        hashes = [_write_array(path, values) for path, values in zip(files, (np.concatenate(parts), ends), strict=True)]
        shards.append(Shard(documents=len(ends), tokens=held, tokens_sha256=hashes[0], ends_sha256=hashes[1], next=after))
        manifest.write(folder)

    for cursor, tokens in pool.documents(source, split, after):
        after = (cursor[0], cursor[1] + 1)
        if len(tokens):
            parts.append(tokens)
            held += len(tokens)
        if held >= manifest.shard_tokens:
            write()
            done, held, parts = done + held, 0, []
        watch(split, done + held, source.progress())
    if parts:
        write()


def _write_array(path: Path, values: np.ndarray) -> str:
    """The SHA-256 of what the file should hold: of the bytes in memory, so that what a disk does to them is found."""
    content = BytesIO()
    np.save(content, values)
    write_bytes(path, content.getbuffer())
    return sha256(content.getbuffer()).hexdigest()


class Pool:
    """Processes that tokenise."""

    def __init__(self, executor: ProcessPoolExecutor, jobs: int) -> None:
        self._executor, self._most = executor, AHEAD * jobs

    def documents(self, source: TextSource, split: Split, start: Cursor) -> Iterator[tuple[Cursor, np.ndarray]]:
        """(cursor, ids) of each document from `start` on, in the source's order."""
        waiting: deque[tuple[list[Cursor], Future[tuple[np.ndarray, list[int]]]]] = deque()
        chunks = _chunks(source, split, start)
        while True:
            while len(waiting) < self._most and (chunk := next(chunks, None)):
                cursors, texts = chunk
                waiting.append((cursors, self._executor.submit(_encode, texts)))
            if not waiting:
                return
            cursors, encoded = waiting.popleft()
            tokens, ends = encoded.result()
            yield from zip(cursors, np.split(tokens, ends[:-1]), strict=True)


def _chunks(source: TextSource, split: Split, start: Cursor) -> Iterator[tuple[list[Cursor], list[str]]]:
    cursors: list[Cursor] = []
    texts: list[str] = []
    characters = 0
    for cursor, text in source.documents(split, start):
        cursors.append(cursor)
        texts.append(text)
        characters += len(text)
        if characters >= CHUNK_CHARACTERS:
            yield cursors, texts
            cursors, texts, characters = [], [], 0
    if texts:
        yield cursors, texts


@contextmanager
def _processes(tokenizer: Tokenizer, jobs: int) -> Iterator[Pool]:
    # Where forking is safe, a process is there at once, with the tokenizer; elsewhere each imports the package, which takes seconds.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    executor = ProcessPoolExecutor(jobs, context, _start, (tokenizer,))
    executor.submit(int)  # forks them all now, before the source or a progress bar starts a thread
    try:
        yield Pool(executor, jobs)
    finally:
        executor.shutdown(cancel_futures=True)


_tokenizer: Tokenizer  # of this process, if it is one that tokenises


def _start(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer, tokenizer.threads = tokenizer, 1
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that writes
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    Thread(target=end_with_parent, daemon=True).start()  # else a parent that is killed leaves its processes waiting for ever


def _encode(texts: list[str]) -> tuple[np.ndarray, list[int]]:
    """(ids of all texts, where each ends in them)."""
    documents = _tokenizer.encode_documents(texts)
    tokens = np.concatenate(documents).astype(np.uint16 if _tokenizer.vocab_size <= 2**16 else np.uint32)
    return tokens, np.cumsum([len(document) for document in documents]).tolist()
