"""Progress of evaluation and generation on stderr: a bar with rate and time left in a terminal, a line now and then elsewhere. That of
training is `training.progress`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fullband.amounts import duration, short
from fullband.decode.texts import NewText
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
        self.left[kind] = max(0, self.left[kind] - rows * length)  # padding is computed too

    @property
    def positions(self) -> int:
        return self.total - sum(self.left.values())

    def time_left(self) -> str:
        if any(self.left[kind] and not self.done[kind] for kind in (True, False)):
            return "?"
        return duration(sum(self.left[kind] * self.seconds[kind] / self.done[kind] for kind in (True, False) if self.left[kind]))


@contextmanager
def forward_progress(
    console: Console, model: LoadedModel, total: int, what: str, patience: float = PATIENCE, single: int = 0
) -> Iterator[None]:
    """While the block runs, watch the trunk compute `total` positions, `single` of them one by one where others are computed at once. It
    appears once that has taken `patience` seconds, and goes as soon as they are computed."""
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


@contextmanager
def counted_progress(console: Console, announce: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Gives watch(what, done, total): a bar for each `what`, once two seconds have passed, with rate and time left. Without a terminal a
    line when something begins and now and then, unless nothing is to be announced."""
    lines, begun, since = ProgressLines(console), time.perf_counter(), {"": 0.0}
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task("", total=None, rate="")

    def watch(what: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if not console.is_interactive:
            if announce:
                lines.say(what, f"{done:,} of {total:,}")
            return
        if what not in since:
            since[what] = now
            bar.reset(task, description=what, total=total or None, rate="")
        elapsed = now - since[what]
        bar.update(task, completed=done, total=total or None, rate=f"{done / elapsed:.1f}/s" if elapsed > 1 else "")
        if not bar.live.is_started and now - begun >= PATIENCE:
            bar.start()

    try:
        yield watch
    finally:
        if bar.live.is_started:
            bar.stop()


class BatchProgress(AbstractContextManager["BatchProgress"]):
    """On stderr: a bar with tokens a second and the time left in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, total: int, limit: int, quiet: bool = False):
        """`limit` is the most tokens a completion has; `quiet` where completions are printed on the same terminal."""
        self._console, self._total, self._limit, self._quiet = console, total, limit, quiet
        self._begun = self._last_line = time.perf_counter()
        self._tokens, self._before = 0, 0.0
        self._bar: Progress | None = None
        if console.is_interactive and not quiet:
            columns = [TextColumn("completions"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")]
            self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> BatchProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def of_batch(self, before: int, rows: int) -> Any:
        """Watches the steps of a batch of `rows` completions, after `before` others."""
        if not self._before:
            self._before = before  # of an earlier run: not counted into the rate
        made, finished = 0, 0

        def watch(new: NewText) -> None:
            nonlocal made, finished
            made, finished = made + 1, finished + len(new.finished)
            self._tokens += len(new.tokens)
            self._show(before + max(finished, rows * min(made, self._limit) / self._limit * (finished < rows)))

        return watch

    def _show(self, done: float) -> None:
        now = time.perf_counter()
        seconds = now - self._begun
        if self._quiet or (not self._bar and now - self._last_line < LINES_EVERY):
            return
        here = done - self._before
        left = duration(seconds * (self._total - done) / here) if here > 0 else "?"
        state = f"{short(self._tokens / seconds)} tokens/s  {left} left"
        if self._bar:
            self._bar.update(self._task, completed=int(done), description=state)
        else:
            self._last_line = now
            self._console.print(f"completions {int(done)}/{self._total}  {state}", soft_wrap=True)
