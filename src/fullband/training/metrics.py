"""Where the numbers of a run go: metrics.jsonl always, TensorBoard or Weights & Biases by one setting."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fullband.files import write_bytes

METRICS = "metrics.jsonl"
TRACKERS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # their modules


class Tracker(Protocol):
    def log(self, step: int, values: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one object a line, `step` first. `drop_from` forgets what a resumed run will write again: from 0 on, all of it; with
    `validates_again` the validation of the step before, too."""

    def __init__(self, folder: Path, drop_from: int, validates_again: bool = False):
        """Raises ValueError as `read_metrics`, and naming the file if it cannot be written."""
        self.path = folder / METRICS
        kept = [entry for entry in read_metrics(self.path) if entry["step"] < drop_from] if drop_from and self.path.is_file() else []
        if validates_again:
            kept = [entry for entry in kept if entry["step"] != drop_from - 1 or "validation" not in entry]
        with self._named_errors():
            write_bytes(self.path, "".join(map(_line, kept)).encode())

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Raises ValueError naming the file if it cannot be written."""
        with self._named_errors(), open(self.path, "a", encoding="utf-8") as file:
            file.write(_line({"step": step, **values}))

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be written ({error.strerror or error})") from None

    def close(self) -> None:
        pass  # no line leaves the file open


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl, or of the metrics.jsonl.gz that stands for it in published results; a last line cut short by a kill
    is left out.

    Raises ValueError naming the line for damage elsewhere, and for a file of another kind.
    """
    entries: list[dict[str, Any]] = []
    content = _content(path)
    lines = content.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and not content.endswith(b"\n"):
                break
            raise ValueError(f"{path}:{number}: damaged; remove the line to go on without what it logged") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise ValueError(f"{path}:{number}: no entry of a run; was this file written by another program?")
        entries.append(entry)
    return entries


def has_metrics(folder: Path) -> bool:
    """Whether a run logged there, or its log is kept there compressed."""
    return any((folder / name).is_file() for name in (METRICS, f"{METRICS}.gz"))


def _content(path: Path) -> bytes:
    packed = path.with_name(f"{path.name}.gz")
    if path.suffix != ".gz" and (path.is_file() or not packed.is_file()):
        return path.read_bytes()
    packed = path if path.suffix == ".gz" else packed
    try:
        return gzip.decompress(packed.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{packed}: damaged ({error})") from None


def check_tracker(kind: str) -> None:
    """Raises ValueError if the package of a recipe's `train.tracker` is not installed."""
    if kind == "none":
        return
    try:
        import_module(TRACKERS[kind])
    except ImportError:
        raise ValueError(f"train.tracker: {kind} is not installed; pip install 'fullband[track]'") from None


class TensorBoard:
    def __init__(self, folder: Path, drop_from: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=drop_from)

    def log(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                self.log(step, {f"{name}/{part}": inner for part, inner in value.items()})
            elif isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, name: str, recipe: dict[str, Any]):
        import wandb

        self._run = wandb.init(project="fullband", name=name, config=recipe, dir=str(folder), id=name, resume="allow")

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=max(step, 0))  # -1 is before the first step, and no step here

    def close(self) -> None:
        self._run.finish()


def open_trackers(
    kind: str, folder: Path, name: str, recipe: dict[str, Any], drop_from: int, validates_again: bool = False
) -> list[Tracker]:
    """metrics.jsonl, and the tracker the recipe names. `check_tracker` says whether that one is installed."""
    trackers: list[Tracker] = [JsonLines(folder, drop_from, validates_again)]
    if kind == "tensorboard":
        trackers.append(TensorBoard(folder, drop_from))
    elif kind == "wandb":
        trackers.append(WeightsAndBiases(folder, name, recipe))
    return trackers
