"""Stopping well: SIGTERM, SIGUSR1 (a scheduler before preemption), SIGHUP (a terminal that is closed) and Ctrl-C end a run after the step
in hand, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """`signal` is the number of the signal that asked, or None. Ctrl-C after any of them ends the process at once; others may come twice: a
    closed terminal sends SIGHUP and so does its shell, schedulers repeat SIGTERM."""

    signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Collects SIGTERM, SIGUSR1, SIGHUP and SIGINT while the block runs; nothing outside the main thread, where Python cannot."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = request.signal or number

    caught = [
        getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
    ]  # Windows knows neither SIGHUP nor SIGUSR1
    before = {number: signal.signal(number, ask) for number in caught if signal.getsignal(number) is not signal.SIG_IGN}  # nohup's
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
