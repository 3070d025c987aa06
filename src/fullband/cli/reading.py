"""Progress of reading long texts on stderr, once it has taken two seconds, counted in positions the trunk has read: a bar in a terminal,
a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fullband.loading import LoadedModel

PATIENCE = 2.0  # seconds
LINES_EVERY = 10.0  # seconds between lines where there is no terminal


class ProgressLines:
    """Progress without a terminal: a line when something begins, then one at most every `every` seconds."""

    def __init__(self, console: Console, every: float = LINES_EVERY):
        self.console, self.every = console, every
        self.doing, self.last_line = "", 0.0

    def say(self, what: str, done: str) -> None:
        now = time.perf_counter()
        if what == self.doing and now - self.last_line < self.every:
            return
        self.console.print(f"{what}  {done}" if what == self.doing else what, soft_wrap=True)
        self.doing, self.last_line = what, now


@contextmanager
def reading_progress(console: Console, model: LoadedModel, total: int, what: str, patience: float = PATIENCE) -> Iterator[None]:
    """While the block runs, watch the trunk read `total` positions. The bar goes as soon as they are read."""
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn()]
    bar, lines = Progress(*columns, console=console, transient=True), ProgressLines(console)
    task = bar.add_task(what, total=total)
    begun, read = time.perf_counter(), 0

    def count(trunk: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
        nonlocal read
        read += inputs[0].shape[0] * inputs[0].shape[1]
        done = min(read, total)  # padding is read too
        bar.update(task, completed=done)
        if bar.live.is_started and done == total:
            bar.stop()
        elif done < total and time.perf_counter() - begun >= patience:
            show(done)

    def show(done: int) -> None:
        if not console.is_interactive:
            lines.say(what, f"{done / total:.0%}")
        elif not bar.live.is_started:
            bar.start()

    watched = model.trunk.register_forward_hook(count)
    try:
        yield
    finally:
        watched.remove()
        if bar.live.is_started:
            bar.stop()
