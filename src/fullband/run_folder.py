"""The checkpoints of a run folder, as everybody finds them: which one is the newest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullband.files import verify_manifest

CHECKPOINTS, LAST = "checkpoints", "last.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint to go on from in `folder`, a run's folder of checkpoints; None if there is none.

    It is the one that last.json names. Where that file is missing or damaged, or names a folder that is gone, it is the newest checkpoint
    that is whole. Raises ValueError if none of those that are there is.
    """
    named = read_pointer(folder / LAST).get("checkpoint")
    if isinstance(named, str) and named and (folder / named).is_dir():
        return folder / named
    found = whole_checkpoints(folder)
    if not found and any(folder.glob("step-*")):
        raise ValueError(f"{folder}: none of its checkpoints is whole; choose another folder with --set output=...")
    return found[0] if found else None


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints whose files are what was saved, newest first."""
    whole = []
    for place in sorted((p for p in folder.glob("step-*") if p.is_dir()), reverse=True):  # names sort by step
        try:
            verify_manifest(place)
        except ValueError:
            continue
        whole.append(place)
    return whole


def read_pointer(path: Path) -> dict[str, Any]:
    """last.json or best.json; empty if it is missing or damaged: what it says can be found again."""
    try:
        pointer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return pointer if isinstance(pointer, dict) else {}
