"""Recipes with everything on, what a run leaves on disk, and child processes that may be killed."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullband.config import Recipe
from fullband.training.checkpoint import Checkpoints
from fullband.training.metrics import read_metrics

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="kills children made by os.fork")


def everything_on(source: dict[str, Any]) -> dict[str, Any]:
    """Overrides: phases, prefix mixin, jitter, adaptive schedule, fusion warm-up, microbatches, evaluation, cooldown with z-loss."""
    return {
        "data__source": source,
        "data__length": 20,
        "data__shuffle_documents": 8,
        "feedback": {
            "schedule": [{"fraction": 0.3, "passes": {1: 1.0}}, {"fraction": 0.7, "passes": {2: 0.6, 3: 0.4}}],
            "fusion_warmup": 3,
            "adaptive": {"every": 4, "passes": 8, "rows": 2, "tolerance": 1e-6},
        },
        "optim": {"warmup_steps": 4, "cooldown": 0.5, "z_loss": 1e-3},
        "train": {"steps": 20, "batch_rows": 4, "microbatch_rows": 2, "checkpoint_every": 3, "log_every": 1, "device": "cpu"},
        "evaluation": {"every": 3, "rows": 3, "batch_rows": 2, "feedback_passes": [0, 2]},
    }


def left_on_disk(folder: Path | str) -> dict[str, Any]:
    """Every byte of a run's checkpoints and pointers, and its metrics; only the speed may differ between equal runs."""
    folder = Path(folder)
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted((folder / "checkpoints").rglob("*")) if p.is_file()}
    metrics = [{k: v for k, v in entry.items() if k != "tokens_per_second"} for entry in read_metrics(folder / "metrics.jsonl")]
    return {"files": files, "metrics": metrics}


def assert_same_run(one: Path | str, other: Path | str) -> None:
    a, b = left_on_disk(one), left_on_disk(other)
    assert a["metrics"] == b["metrics"]
    assert a["files"].keys() == b["files"].keys()
    assert [name for name in a["files"] if a["files"][name] != b["files"][name]] == []


def last_of(folder: Path | str) -> Path:
    last = Checkpoints(Path(folder) / "checkpoints").last()
    assert last is not None
    return last


def with_changes(recipe: Recipe, **overrides: Any) -> Recipe:
    """The recipe with `section__key=value` changed, validated again."""
    raw = copy.deepcopy(recipe.model_dump())
    for key, value in overrides.items():
        *sections, leaf = key.split("__")
        node = raw
        for section in sections:
            node = node[section]
        node[leaf] = value
    return Recipe.model_validate(raw)


class StopAt:
    """A watcher that asks for the end of the run, as Ctrl-C does, once `step` steps are done."""

    def __init__(self, step: int):
        self.step = step

    def started(self, run: Any, groups: str) -> None: ...

    def stepped(self, run: Any, values: dict[str, Any]) -> None:
        if run.step == self.step:
            signal.raise_signal(signal.SIGTERM)

    def evaluated(self, run: Any, losses: dict[str, float]) -> None: ...


class ChildEnd:
    """How a child ended: `signal` that killed it or None, and `error`, the text of the exception that ended it."""

    def __init__(self, status: int, error: str):
        self.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        self.error = error


def in_child(work: Callable[[], Any]) -> ChildEnd:
    """Run `work` in a fork of this process, which may die of it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        error = pipe.read()
    return ChildEnd(os.waitpid(child, 0)[1], error)


def on_file_change(number: int, act: Callable[[], None], only: tuple[str, ...] = ()) -> Callable[[], int]:
    """Before this process changes the file system for the `number`-th time (from 1), `act`; returns a function that counts the changes.

    Changes are what Python's audit events call so: opening for writing, renaming, removing, making folders. Cannot be undone: only for
    children. `only` counts the named events alone.
    """
    changes = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal changes
        if event == "open":
            changing = bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and not str(args[0]).startswith("/dev")
        elif event == "os.mkdir":
            changing = not os.path.exists(args[0])
        else:
            changing = event in ("os.rename", "os.remove", "os.rmdir")
        if changing and (not only or event in only):
            changes += 1
            if changes == number:
                act()

    sys.addaudithook(hook)
    return lambda: changes


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
