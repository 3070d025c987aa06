"""Progress of reading long texts on stderr, once it has taken two seconds, counted in positions the trunk has read: a bar in a terminal,
a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fullband.amounts import duration
from fullband.loading import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor

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


class Pace:
    """Positions done, and the time that the others will take. Those that are run one by one have a pace of their own, a far slower one."""

    def __init__(self, total: int, single: int):
        """`single` of the `total` positions are run one by one; 0 = all have one pace."""
        self.total, self.left = total, {True: single, False: total - single}
        self.kinds, self.done = single > 0, {True: 0, False: 0}
        self.seconds = {True: 0.0, False: 0.0}
        self.last = time.perf_counter()

    def count(self, rows: int, length: int) -> None:
        now, kind = time.perf_counter(), self.kinds and length == 1
        self.seconds[kind] += now - self.last
        self.last = now
        self.done[kind] += rows * length
        self.left[kind] = max(0, self.left[kind] - rows * length)  # padding is read too

    @property
    def positions(self) -> int:
        return self.total - sum(self.left.values())

    def time_left(self) -> str:
        if any(self.left[kind] and not self.done[kind] for kind in (True, False)):
            return "?"
        return duration(sum(self.left[kind] * self.seconds[kind] / self.done[kind] for kind in (True, False) if self.left[kind]))


@contextmanager
def reading_progress(
    console: Console, model: LoadedModel, total: int, what: str, patience: float = PATIENCE, single: int = 0
) -> Iterator[None]:
    """While the block runs, watch the trunk read `total` positions, `single` of them one by one where others are read at once. The bar goes
    as soon as they are read."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[left]} left"),
    ]
    bar, lines = Progress(*columns, console=console, transient=True), ProgressLines(console)
    task = bar.add_task(what, total=total, left="?")
    begun, pace = time.perf_counter(), Pace(total, single)

    def count(x_BTD: Tensor) -> None:
        pace.count(*x_BTD.shape[:2])
        done = pace.positions
        bar.update(task, completed=done, left=pace.time_left())
        if bar.live.is_started and done == total:
            bar.stop()
        elif done < total and time.perf_counter() - begun >= patience:
            show(done)

    def show(done: int) -> None:
        if not console.is_interactive:
            lines.say(what, f"{done / total:.0%}, {pace.time_left()} left")
        elif not bar.live.is_started:
            bar.start()

    from fullband.trunk.residual import runs_watched  # it imports torch

    try:
        with runs_watched(model.trunk, count):
            yield
    finally:
        if bar.live.is_started:
            bar.stop()
