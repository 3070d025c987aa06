"""Progress of reading long texts: a bar on stderr once it has taken two seconds, counted in positions the trunk has read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fullband.loading import LoadedModel

PATIENCE = 2.0  # seconds


@contextmanager
def reading_progress(console: Console, model: LoadedModel, total: int, what: str, patience: float = PATIENCE) -> Iterator[None]:
    """While the block runs, watch the trunk read `total` positions. The bar goes as soon as they are read.

    Without a terminal there is none.
    """
    if not console.is_interactive:
        yield
        return
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn()]
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what, total=total)
    begun, done = time.perf_counter(), 0

    def count(trunk: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
        nonlocal done
        done += inputs[0].shape[0] * inputs[0].shape[1]
        bar.update(task, completed=min(done, total))  # padding is read too
        if not bar.live.is_started and done < total and time.perf_counter() - begun >= patience:
            bar.start()
        elif bar.live.is_started and done >= total:
            bar.stop()

    watched = model.trunk.register_forward_hook(count)
    try:
        yield
    finally:
        watched.remove()
        if bar.live.is_started:
            bar.stop()
