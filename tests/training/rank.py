"""One rank of a sharded run, as torchrun starts it: `python rank.py RECIPE [float64] [resume] [CHANGE …]`.

Writes what every rank saw of the schedule beside the run, as RECIPE's folder + `.rank-N.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fullband.cli.errors import explain
from fullband.config import load_recipe
from fullband.data.loader import Loader
from fullband.feedback.schedule import PassSchedule
from fullband.training import checkpoint, train

RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    torch.set_num_threads(1)
    path, *words = sys.argv[1:]
    recipe = load_recipe(path, [word for word in words if "=" in word])
    if "float64" in words:
        torch.set_default_dtype(torch.float64)
    drawn: list[Any] = []
    prefixes = PassSchedule.prefixes

    def noted(self: PassSchedule, step: int, accumulation: int, passes: int, *rest: Any) -> Any:
        found = prefixes(self, step, accumulation, passes, *rest)
        drawn.append([step, accumulation, passes, [p if isinstance(p, int) else p.tolist() for p in found]])
        return found

    PassSchedule.prefixes = noted  # type: ignore[method-assign]
    disturb(words)
    try:
        result = train(recipe, "resume" in words)
    except ValueError as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(2)
    Path(f"{recipe.folder}.rank-{RANK}.json").write_text(json.dumps(drawn))
    print(f"rank {RANK} ended after step {result.steps}")


def kill_at_second(function: Any) -> Any:
    """In the middle of the second checkpoint: its tensors are written, it has not its name yet."""
    count = 0

    def called(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    return called


def disturb(words: list[str]) -> None:
    """`kill-1`, `hang-1`, `fail-1`, `term-1`: what rank 1 does when it asks for the batch of its fourth step; `save-0`: killed while it
    saves."""
    if f"save-{RANK}" in words:
        checkpoint.write_manifest = kill_at_second(checkpoint.write_manifest)  # type: ignore[attr-defined]
    found = [word for word in words if word in (f"kill-{RANK}", f"hang-{RANK}", f"fail-{RANK}", "fail-all", f"term-{RANK}")]
    if not found:
        return
    count, following = 0, Loader.next_batch

    def next_batch(self: Loader) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            kind = found[0].partition("-")[0]
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "term":
                os.kill(os.getpid(), signal.SIGUSR1)
            elif kind == "hang":
                time.sleep(1000)
            else:
                raise ValueError("the data are gone")
        return following(self)

    Loader.next_batch = next_batch  # type: ignore[method-assign]


main()
