"""Who is missing: every rank tells the others twice a second that it lives and where it is, so that a rank that died or hangs is named.

Collectives themselves say little: where a rank has died, gloo reports a closed connection and NCCL nothing at all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

BEAT = 0.5  # seconds between two signs of life
DEAD = 4.0  # seconds without one, once something is known to have failed
SILENT = 60.0  # seconds without one, when nothing else is known: a long call may hold Python's lock


class Watch:
    """A thread of each rank. While the context is open, the process ends with one line where another rank died, failed, or went on for
    more than `timeout` seconds without finishing its part of a step.

    `mark` says that this rank goes on; an error that leaves the context is told to the others.
    """

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.alarmed = False
        self.state = "running"
        self._marked = time.monotonic()
        self._main = threading.get_ident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch over ranks", daemon=True)
        self._failures = 0

    def __enter__(self) -> Watch:
        self._store, self._waiting = self._connected(), self._connected()  # a call that waits holds its connection
        self._beat(0)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, SystemExit):
            if _is_lost_connection(error):
                self.mark()
                self.alarmed = True
                with suppress(ValueError):  # outside the main thread; a launcher ends all ranks at once, and nobody would have said why
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                self._end.wait(DEAD + 4)  # the thread finds out who is missing, and ends the process
            self.state = "failed: " + (" ".join(str(error).split())[:300] or type(error).__name__)
        else:
            self.state = "ended"
        self._end.set()
        self._thread.join(2 * BEAT + 1)
        with suppress(Exception):  # nobody may be there to be told
            self._beat(10**9)

    def mark(self) -> None:
        self._marked = time.monotonic()

    def all_failed(self, within: float = 3.0) -> bool:
        """Whether every rank asks this at about the same time, for the n-th time: all of them have failed at one point."""
        self._failures += 1
        self.mark()
        self.alarmed = True
        keys = [f"failed/{self._failures}/{rank}" for rank in range(self.world)]
        try:
            self._waiting.set(keys[self.rank], "")
            self._waiting.wait(keys, timedelta(seconds=within))
        except Exception:
            return False
        self.alarmed = False
        return True

    def _connected(self) -> Any:
        import torch.distributed as dist

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
        return dist.PrefixStore(f"fullband/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def _beat(self, count: int) -> None:
        waits, place = where(sys._current_frames().get(self._main))
        sign = {"beat": count, "state": self.state, "waits": waits, "place": place}
        self._store.set(f"rank/{self.rank}", json.dumps(sign))

    def _watch(self) -> None:
        seen: dict[int, tuple[int, float]] = {}
        count = 0
        while not self._end.wait(BEAT):
            count += 1
            try:
                self._beat(count)
                keys = [f"rank/{rank}" for rank in range(self.world)]
                present = [rank for rank, key in enumerate(keys) if self._store.check([key])]
                signs = {rank: json.loads(self._store.get(keys[rank])) for rank in present}
            except Exception:
                self._stop("the process that started the ranks, or rank 0, is gone", {self.rank})
                return
            now = time.monotonic()
            for rank, sign in signs.items():
                if rank not in seen or seen[rank][0] != sign["beat"]:
                    seen[rank] = sign["beat"], now
            if found := self._missing(signs, {rank: now - at for rank, (_, at) in seen.items()}, now):
                self._stop(*found)

    def _missing(self, signs: dict[int, dict[str, Any]], silence: dict[int, float], now: float) -> tuple[str, set[int]] | None:
        """What to say, and the ranks that are left to say it."""
        left = set(signs)
        failed = {rank: sign["state"] for rank, sign in signs.items() if sign["state"].startswith("failed")}
        if failed and self.rank not in failed:
            rank, why = min(failed.items())
            return f"rank {rank} of {self.world} {why}", left - set(failed)
        overdue = now - self._marked > self.timeout
        patience = DEAD if self.alarmed or overdue else SILENT
        dead = {rank for rank, quiet in silence.items() if quiet > patience and rank != self.rank and signs[rank]["state"] == "running"}
        if dead:
            names = ", ".join(map(str, sorted(dead)))
            return f"rank {names} of {self.world} has died: no sign of life for {patience:g} s", left - dead
        if overdue and not self.alarmed:
            busy = {rank: sign["place"] for rank, sign in signs.items() if not sign["waits"] and sign["state"] == "running"}
            if not busy:
                return f"all ranks have waited for one another for more than {self.timeout:g} s (parallel.timeout)", left
            places = ", ".join(f"rank {rank} of {self.world} hangs at {place}" for rank, place in sorted(busy.items()))
            return f"{places}: the others have waited for more than {self.timeout:g} s (parallel.timeout)", left
        return None

    def _stop(self, why: str, speakers: set[int]) -> None:
        """End this process, whatever its main thread is in. One of the ranks that are left says why."""
        if self.rank == min(speakers, default=self.rank):
            print(f"error: {why}; this run stops: continue from its last checkpoint with --resume", file=sys.stderr, flush=True)
        else:
            time.sleep(1.0)  # a launcher ends all ranks as soon as one has ended: let it speak
        os._exit(1)


def where(frame: FrameType | None) -> tuple[bool, str]:
    """(whether a thread waits for other ranks, the innermost place outside torch: file and line)."""
    waits, place = False, ""
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        waits = waits or "/torch/distributed/" in path or path == __file__
        if not place and "/torch/" not in path:
            place = f"{'/'.join(Path(path).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return waits, place


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    import torch.distributed as dist

    text = str(error).lower()
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and ("gloo" in text or "connection" in text))
