"""Interleaved timing: every round runs every candidate once, so that whatever disturbs the machine disturbs them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Clock = Literal["wall", "cpu"]


@dataclass(frozen=True)
class Timings:
    """Seconds of every candidate in every round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def best(self, name: str) -> float:
        """The minimum: on a machine with other work the noise only adds."""
        return min(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """Minimum against minimum."""
        return self.best(name) / self.best(base)

    def spread(self, name: str, base: str) -> list[float]:
        """[lower quartile, median, upper quartile] of the ratios within a round."""
        ratios = [a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True)]
        if len(ratios) == 1:
            return ratios * 3
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return [low, middle, high]


def interleave(
    candidates: dict[str, Callable[[], object]], rounds: int, clock: Clock = "wall", label: str = "", warm_up: bool = True
) -> Timings:
    """Run all candidates `rounds` times, each round in another rotation of the order, after one run each that does not count.

    `cpu` counts this process's CPU seconds instead of the wall's: with one thread, other processes then hardly matter. `warm_up` False is
    for candidates that have just run.
    """
    read = time.perf_counter if clock == "wall" else time.process_time
    names = list(candidates)
    timings = Timings({name: [] for name in names})
    schedule = range(0 if warm_up else 1, rounds + 1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=len(names) * len(schedule))
        for number in schedule:
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                _finish_device_work()
                start = read()
                candidates[name]()
                _finish_device_work()
                if number:  # round 0 warms up
                    timings.seconds[name].append(read() - start)
                progress.advance(task)
    return timings


def _finish_device_work() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
