"""How training runs stand, from their folders: what is running, where, how fast, and what is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullband.config import Recipe, load_recipe
from fullband.files import LOCK, InUseError, alone_in
from fullband.training.metrics import METRICS, has_metrics, read_metrics
from fullband.training.run import RECIPE
from fullband.training.starts import read_starts
from fullband.training.work import Work


@dataclass(frozen=True)
class Standing:
    """A run.

    state   running, complete, stopped, failed, killed (it neither runs nor said that it ended), or damaged, with the reason in `note`
    steps   done and logged; `of` that the recipe asks for
    losses  nats by pass, as logged last; `validation` by feedback passes
    seconds_left   at the speed since it was started; None unless it is running
    """

    folder: Path
    state: str
    steps: int = 0
    of: int | None = None
    losses: dict[str, float] | None = None
    validation: dict[str, float] | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    note: str = ""
    host: str | None = None


def runs_in(folders: list[Path]) -> list[Path]:
    """The run folders among `folders` and below them, by name. Raises ValueError for one that does not exist, and if there is none."""
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        found += _below(folder)
    if not found:
        raise ValueError(f"{', '.join(map(str, folders))}: no run is here (a run's folder has a {RECIPE})")
    return list(dict.fromkeys(found))


def _below(folder: Path) -> Iterator[Path]:
    """Run folders hold no others, and links are not followed."""
    if (folder / RECIPE).is_file() and (has_metrics(folder) or (folder / "checkpoints").is_dir()):
        yield folder
        return
    try:
        inside = sorted(place for place in folder.iterdir() if place.is_dir() and not place.is_symlink() and not place.name.startswith("."))
    except PermissionError:
        return
    for place in inside:
        yield from _below(place)


def standing(folder: Path) -> Standing:
    """How the run in `folder` stands. Never raises: what is damaged is said in it."""
    try:
        recipe = load_recipe(folder / RECIPE, [])
        entries = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    except ValueError as error:
        return Standing(folder, "damaged", note=str(error).splitlines()[0])
    steps = [entry for entry in entries if "objective" in entry]
    last = steps[-1] if steps else {}
    evaluated = [entry["validation"] for entry in entries if isinstance(entry.get("validation"), dict)]
    done, starts = int(last.get("step", -1)) + 1, read_starts(folder)
    state, note = _state(folder, starts, done, recipe.train.steps)
    started: dict[str, Any] = next((entry for entry in reversed(starts) if entry["event"] == "started"), {})
    return Standing(
        folder,
        state,
        done,
        recipe.train.steps,
        {key.removeprefix("loss_pass_"): value for key, value in last.items() if key.startswith("loss_pass_")} or None,
        evaluated[-1] if evaluated else None,
        last.get("tokens_per_second"),
        _left(folder, recipe, started, done) if state == "running" else None,
        note,
        started.get("host"),
    )


def _state(folder: Path, starts: list[dict[str, Any]], done: int, of: int) -> tuple[str, str]:
    if is_locked(folder):
        return "running", ""
    if starts and starts[-1]["event"] == "ended":
        how = str(starts[-1].get("how", ""))
        return ("stopped", how.removeprefix("stopped").strip()) if how.startswith("stopped") else (how, str(starts[-1].get("error", "")))
    if done >= of:
        return "complete", ""
    return ("killed", "") if starts else ("stopped", "")  # runs of older versions do not say how they ended


def is_locked(folder: Path) -> bool:
    """Whether a process is at work there."""
    if not (folder / LOCK).is_file():
        return False
    try:
        with alone_in(folder):
            return False
    except InUseError:
        return True
    except ValueError:  # a folder that is not ours to write
        return False


def _left(folder: Path, recipe: Recipe, started: dict[str, Any], done: int) -> float | None:
    """Seconds, if the rest takes as long as what was done since the start."""
    try:
        begun = datetime.fromisoformat(str(started["at"]))
        logged = datetime.fromtimestamp((folder / METRICS).stat().st_mtime, UTC)
    except (KeyError, ValueError, OSError):
        return None
    work = Work.of(recipe.feedback, recipe.train, recipe.data.length)
    spent, left = work.remaining(int(started.get("step", 0))) - work.remaining(done), work.remaining(done)
    seconds = (logged - begun).total_seconds()
    return seconds * left / spent if spent > 0 and seconds > 0 else None  # clocks may jump
