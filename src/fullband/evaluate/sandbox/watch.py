"""What the processes of a sandbox use together, as seen from outside it: nothing in there can stop, starve or mislead who counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = "/proc"


def use_below(first: int) -> tuple[int, int]:
    """Bytes of memory and number of the processes below `first`, itself left out. All in a PID namespace are below its first process.

    Raises OSError if /proc can't be read, also once `first` is gone.
    """
    os.stat(f"{PROC}/{first}")
    memory = processes = 0
    for process in _below(first):
        try:
            memory += _held_by(process)
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        processes += 1
    return memory, processes


def _held_by(process: int) -> int:
    """Bytes that a process has in memory or swapped out. Its threads share them; one that has ended, be it the first, shows none."""
    for thread in sorted(os.listdir(f"{PROC}/{process}/task"), key=int):
        try:
            lines = [line.split() for line in Path(f"{PROC}/{process}/task/{thread}/status").read_bytes().splitlines()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        shown = [int(line[1]) << 10 for line in lines if line and line[0] in (b"VmRSS:", b"VmSwap:")]
        if shown:
            return sum(shown)
    return 0


def _below(first: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir(PROC):
        if entry.isdigit():
            try:
                stat = Path(f"{PROC}/{entry}/stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(entry))
    waiting = children.get(first, [])
    while waiting:
        process = waiting.pop()
        yield process
        waiting += children.get(process, [])
