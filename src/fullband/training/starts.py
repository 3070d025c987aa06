"""starts.jsonl: every time that a run was started or resumed, with what on, and how it ended. A kill leaves a start without an end."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fullband.training.run import Run

STARTS = "starts.jsonl"
PACKAGES = ("fullband", "torch", "transformers", "tokenizers", "datasets", "numpy")


@contextmanager
def recorded(run: Run) -> Iterator[dict[str, Any]]:
    """Says that the run has started, and how it ends: complete, stopped by a signal that the block puts under "signal" in what it is
    given, or failed, with the error in a line. A disk that is full keeps nothing of this, and stops nothing."""
    _add(
        run.folder,
        {
            "event": "started",
            "step": run.step,
            "seed": run.recipe.seed,
            "data": run.identity["data"],
            "processes": run.parallel.world,
            **surroundings(run.device),
        },
    )
    ended: dict[str, Any] = {"signal": None}
    try:
        yield ended
    except BaseException as error:
        how = str(error) or type(error).__name__
        _add(run.folder, {"event": "ended", "step": run.step, "how": "failed", "error": how.splitlines()[0]})
        raise
    stopped = f"stopped by {signal.Signals(ended['signal']).name}" if ended["signal"] else "stopped"
    _add(run.folder, {"event": "ended", "step": run.step, "how": "complete" if run.step >= run.recipe.train.steps else stopped})


def surroundings(device: torch.device) -> dict[str, Any]:
    """What a run runs on: versions, the commit of the source tree if there is one, the machine."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "host": platform.node(),
        "process": os.getpid(),
        "command": sys.argv,
        "versions": versions,
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "processor": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
    }


def _commit() -> str | None:
    """Of the checkout that this package is run from, with a + where files were changed; None for an installed one."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):  # another project's checkout that this package lies in
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _add(folder: Path, entry: dict[str, Any]) -> None:
    with suppress(OSError), open(folder / STARTS, "a", encoding="utf-8") as file:
        file.write(json.dumps({"at": datetime.now(UTC).isoformat(timespec="seconds"), **entry}) + "\n")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """All entries; lines that a kill or a full disk has cut are left out."""
    entries: list[dict[str, Any]] = []
    with suppress(OSError, UnicodeError):
        for line in (folder / STARTS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("event") in ("started", "ended"):
                    entries.append(entry)
    return entries
