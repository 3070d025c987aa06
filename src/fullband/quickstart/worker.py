"""A training process of the quickstart: a recipe as JSON on stdin, progress as JSON lines on stdout.

Exit code 2 after a line {"error": …} for a recipe that does not fit, 128 + n when stopped by signal n.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any, TextIO

import torch

from fullband.config import Recipe, parse
from fullband.training.loop import RunResult, train
from fullband.training.run import Run

REPORT_EVERY = 0.2  # seconds


class Reporter:
    """Writes where the run is, a few times a second."""

    def __init__(self, out: TextIO):
        self.out = out
        self.reported = 0.0

    def started(self, run: Run, groups: str) -> None:
        pass

    def stepped(self, run: Run, values: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self.reported < REPORT_EVERY and run.step < run.recipe.train.steps:
            return
        self.reported = now
        losses = {key: value for key, value in values.items() if key.startswith("loss_pass_")}
        progress = {"step": run.step, "token_equivalent": run.token_equivalent, "tokens_per_second": values["tokens_per_second"]}
        say(self.out, progress | {"losses": losses})

    def evaluated(self, run: Run, losses: dict[str, float]) -> None:
        pass


def say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def summary(result: RunResult) -> dict[str, Any]:
    """What the parent needs to know of a finished run, as JSON."""
    milestones = result.milestones
    return {
        "folder": str(result.folder),
        "steps": result.steps,
        "tokens": result.tokens,
        "token_equivalent": result.token_equivalent,
        "executed_positions": result.executed_positions,
        "seconds": result.seconds,
        "switch_on_step": milestones.switch_on_step,
        "shock": milestones.shock,
        "crossover_step": milestones.crossover_step,
    }


def main() -> int:
    torch.set_num_threads(1)  # tensors this small lose time on a second thread
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the parent's
        try:
            recipe = parse(Recipe, json.load(sys.stdin), "quickstart")
            result = train(recipe, watcher=Reporter(out))
        except ValueError as error:
            say(out, {"error": str(error)})
            return 2
    if result.signal:
        return 128 + result.signal
    say(out, {"result": summary(result)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
