"""Progress of training on stderr: a bar in a terminal, a line now and then elsewhere, such as in a notebook."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from fullband.amounts import duration, short
from fullband.training.run import Run
from fullband.training.work import Work

MEMORY = 0.9  # of the running mean of each pass's loss


class TrainingProgress:
    """A Watcher (`train.loop`). Use it as a context, which ends the bar whatever ends the training.

    lines_every   seconds between lines where there is no terminal; the first and the last step always have one
    """

    def __init__(self, console: Console, lines_every: float = 10.0):
        self.console = console
        self.lines_every = lines_every
        self.losses: dict[int, float] = {}  # pass -> running mean
        self.bar: Progress | None = None
        self.task = TaskID(0)
        self.work = Work([], 0.0)
        self.started_at = self.last_line = 0.0
        self.work_before = 0.0
        self.known: dict[str, Any] = {}

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the bar, so that another can begin."""
        if self.bar:
            self.bar.stop()

    def started(self, run: Run, groups: str) -> None:
        """Parameter groups, then where the run stands."""
        self.console.print(groups)
        self.console.print(
            f"\n{'resuming' if run.step else 'training'} {run.folder} on {run.device}, step {run.step} of {run.recipe.train.steps}"
        )
        for notice in run.notices:
            self.console.print(f"note: {notice}", soft_wrap=True)
        self.work = Work.of(run.schedule.config, run.recipe.train, run.loader.length)
        self.started_at = time.perf_counter()
        self.work_before = self.work.remaining(run.step)
        self.known = {"shock": run.milestones.shock, "crossover": run.milestones.crossover_step}
        if run.step >= run.recipe.train.steps:
            self.console.print("the run is complete: nothing left to do")
        elif self.console.is_interactive:
            shown = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=self._bar_width()), TextColumn("{task.description}"))
            self.bar = Progress(*shown, console=self.console)
            self.task = self.bar.add_task("", total=run.recipe.train.steps, completed=run.step)
            self.bar.start()

    def stepped(self, run: Run, values: dict[str, Any]) -> None:
        self._average(values)
        self._milestones(run, values)
        if self.bar:
            steps = len(str(run.recipe.train.steps))
            room = self.console.width - len("step") - (2 * steps + 1) - self._bar_width() - 3  # and a space between columns
            self.bar.update(self.task, completed=run.step, description=self._state(run, values, room))
            return
        now = time.perf_counter()
        if not self.last_line or now - self.last_line >= self.lines_every or run.step == run.recipe.train.steps:
            self.last_line = now
            self.console.print(f"step {run.step}/{run.recipe.train.steps}  {self._state(run, values)}", soft_wrap=True)

    def evaluated(self, run: Run, losses: dict[str, float]) -> None:
        """One line of the validation table: loss by feedback passes, and the difference to none."""
        plain = losses.get("0")
        cells = [f"{passes}: {loss:.4f}" + difference(loss, plain) * (passes != "0") for passes, loss in losses.items()]
        self._say(f"step {run.step}  validation loss by feedback passes  " + "  ".join(cells))

    def _average(self, values: dict[str, Any]) -> None:
        k = 1
        while (loss := values.get(f"loss_pass_{k}")) is not None:
            self.losses[k] = loss if k not in self.losses else MEMORY * self.losses[k] + (1 - MEMORY) * loss
            k += 1

    def _milestones(self, run: Run, values: dict[str, Any]) -> None:
        """Say it when feedback has been switched on, and when it has begun to pay."""
        shock, crossover = values.get("switch_on_shock"), values.get("crossover_step")
        if shock is not None and self.known["shock"] is None:
            where = f"{abs(shock):.3f} nats {'above' if shock > 0 else 'below'} the first"
            self._say(f"step {run.step}  feedback switched on: the second pass starts {where} (switch-on shock)")
        if crossover is not None and self.known["crossover"] is None:
            self._say(f"step {run.step}  crossover: the second pass is now below the first")
        self.known = {"shock": shock, "crossover": crossover}

    def _state(self, run: Run, values: dict[str, Any], room: int = 1000) -> str:
        """How the run stands in at most `room` characters, in all words first; what matters least goes first where there are too many.
        The time left always stays."""
        left = f"{self._time_left(run)} left"
        losses = sorted(self.losses.items())
        by_pass, shorter = ("  ".join(f"{k}: {loss:.{digits}f}" for k, loss in losses) for digits in (4, 2))
        speed, spent = (short(values[key]) for key in ("tokens_per_second", "token_equivalent_compute"))
        for parts in (
            [f"loss by pass  {by_pass}", f"{speed} tokens/s", f"token-equivalent {spent}"],
            [f"loss by pass  {by_pass}", f"{speed} tokens/s"],
            [f"loss  {by_pass}"],
            [f"loss  {shorter}"],
            [f"loss {losses[-1][1]:.2f}" if losses else ""],
        ):
            if len(state := "  ".join([left, *parts])) <= room:
                return state
        return left

    def _bar_width(self) -> int:
        return min(20, max(4, self.console.width // 8))

    def _time_left(self, run: Run) -> str:
        remaining = self.work.remaining(run.step)
        done = self.work_before - remaining
        return duration((time.perf_counter() - self.started_at) * remaining / done) if done > 0 else "?"

    def _say(self, line: str) -> None:
        (self.bar.console if self.bar else self.console).print(line, soft_wrap=True)


def shown_progress() -> TrainingProgress | None:
    """For a caller that asked for none: shown where somebody looks, at a terminal or a notebook."""
    console = Console(stderr=True, highlight=False, markup=False)
    return TrainingProgress(console) if console.is_terminal or console.is_jupyter else None


def difference(loss: float, plain: float | None) -> str:
    return "" if plain is None else f" ({loss - plain:+.4f})"
