"""What the processes of a sandbox use together, as seen from outside it: nothing in there can stop, starve or mislead who counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def use_below(first: int) -> tuple[int, int]:
    """Bytes of memory and number of the processes below `first`, itself left out. All in a PID namespace are below its first process.

    Raises OSError if /proc can't be read, also once `first` is gone.
    """
    os.stat(f"/proc/{first}")
    memory = processes = 0
    for process in _below(first):
        try:
            memory += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        processes += 1
    return memory, processes


def _below(first: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(entry))
    waiting = children.get(first, [])
    while waiting:
        process = waiting.pop()
        yield process
        waiting += children.get(process, [])
