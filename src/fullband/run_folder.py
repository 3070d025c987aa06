"""The checkpoints of a run folder, as everybody finds them: which one is the newest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullband.files import MANIFEST, verify_manifest

CHECKPOINTS, LAST = "checkpoints", "last.json"
NAME = re.compile(r"step-(\d{8,})")  # of a checkpoint; whatever else lies beside them (step-00000500-copy) is the user's


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint to go on from in `folder`, a run's folder of checkpoints; None if there is none.

    It is the one that last.json names. Where that file is missing or damaged, or names a folder that is gone, it is the newest checkpoint
    that is whole. Raises ValueError if none of those that are there is.
    """
    newest = named_checkpoint(folder) or next(whole_checkpoints(folder), None)
    if newest is None and checkpoints_in(folder):
        raise ValueError(f"{folder}: none of its checkpoints is whole; choose another folder with --set output=...")
    return newest


def named_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that last.json names, if it is there."""
    name = read_pointer(folder / LAST).get("checkpoint")
    return folder / name if isinstance(name, str) and NAME.fullmatch(name) and (folder / name).is_dir() else None


def whole_checkpoints(folder: Path) -> Iterator[Path]:
    """The checkpoints whose files are what was saved, newest first."""
    for place in reversed(checkpoints_in(folder)):
        try:
            verify_manifest(place)
        except ValueError:
            continue
        if (place / MANIFEST).is_file():
            yield place


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders that are named as checkpoints, by step."""
    return sorted((place for place in folder.glob("step-*") if NAME.fullmatch(place.name) and place.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def read_pointer(path: Path) -> dict[str, Any]:
    """last.json or best.json; empty if it is missing or damaged: what it says can be found again."""
    try:
        pointer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return pointer if isinstance(pointer, dict) else {}
