"""Train the quickstart's models, each in a process of its own with one thread, side by side where there are two cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fullband.config import Recipe
from fullband.data.tokenize import available_cores
from fullband.feedback.schedule import PassSchedule

WORKER = "fullband.quickstart.worker"


@dataclass(frozen=True)
class Trained:
    """A finished run; see `RunResult`."""

    folder: str
    steps: int
    tokens: int
    token_equivalent: int
    executed_positions: int
    seconds: float
    switch_on_step: int | None
    shock: float | None
    crossover_step: int | None


def train_all(recipes: Sequence[Recipe], console: Console, cores: int | None = None) -> list[Trained]:
    """Train `recipes` and show their progress: as many at a time as there are `cores` (default: this machine's).

    Raises ValueError for a recipe that does not fit or a run that diverged, RuntimeError for a process that broke or was stopped.
    Whatever ends this early ends the processes too.
    """
    children: list[subprocess.Popen[str]] = []
    with RunsProgress(console) as progress, ThreadPoolExecutor(min(len(recipes), cores or available_cores())) as pool:
        futures = [pool.submit(train_in_process, recipe, progress.add(recipe), children) for recipe in recipes]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future for future in futures if future.done() and future.exception()]
            return [future.result() for future in failed or futures]
        finally:
            for future in futures:
                future.cancel()
            for child in children:
                if child.poll() is None:
                    child.terminate()


def train_in_process(recipe: Recipe, row: ProgressRow, children: list[subprocess.Popen[str]]) -> Trained:
    """Train one recipe in a child process, which is added to `children`. Raises as `train_all` does."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    outcome: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | threads,
            text=True,
            encoding="utf-8",
        )
        children.append(child)
        assert child.stdin and child.stdout
        with child.stdin as stdin:
            stdin.write(recipe.model_dump_json())
        with child.stdout as stdout:
            for line in stdout:
                outcome = json.loads(line)
                if "step" in outcome:
                    row.update(outcome)
        code = child.wait()
        if "error" in outcome:
            raise ValueError(f"{recipe.name}: {outcome['error']}")
        if code or "result" not in outcome:
            errors.seek(0)
            last_words = errors.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise RuntimeError(f"{recipe.name}: its training process ended with code {code}: {last_words[0]}")
    return Trained(**outcome["result"])


@dataclass
class ProgressRow:
    """One run's line: its bar counts token-equivalent compute, which is what takes the time."""

    progress: Progress
    task: TaskID
    losses: dict[str, float] = field(default_factory=dict)

    def update(self, report: dict[str, Any]) -> None:
        self.losses |= report["losses"]  # a step of one pass says nothing about the others: theirs stay
        by_pass = [self.losses[key] for key in sorted(self.losses)]
        self.progress.update(
            self.task,
            completed=report["token_equivalent"],
            step=report["step"],
            loss=" ".join(f"{loss:.2f}" for loss in by_pass),
            speed=f"{report['tokens_per_second'] / 1000:.1f}k",
        )


class RunsProgress(Progress):
    """Step, loss by pass, tokens/s and time left of each run."""

    def __init__(self, console: Console):
        super().__init__(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=None),
            TextColumn("step {task.fields[step]:>4}/{task.fields[steps]}"),
            TextColumn("loss by pass [cyan]{task.fields[loss]:<14}"),
            TextColumn("{task.fields[speed]:>5} tokens/s"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=console.width < 110,
            refresh_per_second=4,
        )

    def add(self, recipe: Recipe) -> ProgressRow:
        schedule = PassSchedule(recipe.feedback, recipe.train.steps, recipe.seed)
        total = schedule.token_equivalent_compute(recipe.train.batch_rows * recipe.data.length)
        label = recipe.name.rpartition("-")[2]
        task = self.add_task(label, total=total, step=0, steps=recipe.train.steps, loss="", speed="")
        return ProgressRow(self, task)
