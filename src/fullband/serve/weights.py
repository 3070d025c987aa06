"""Weights that a trainer puts in the place of the served ones: safetensors below one folder, checked before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch import Tensor, nn

from fullband.files import verify_manifest
from fullband.model import WEIGHTS, read_matching
from fullband.serve.engine import LocalEngine
from fullband.serve.scheduler import Scheduler
from fullband.strict import Strict


class ElsewhereError(ValueError):
    """A path that leads out of the folder of weights."""


class WeightsRequest(Strict):
    """POST /fullband/weights. `path` is a model folder or a safetensors file, below the folder that the server was told."""

    path: str


def replace_weights(scheduler: Scheduler, engine: LocalEngine, folder: Path, path: str, seconds: float) -> int:
    """Put the weights of `path` in the place of the engine's, once the answers that were begun have ended; how many tensors. Raises as
    `new_weights`, and TimeoutError if the answers take longer than `seconds`: then nothing changes."""
    tensors = new_weights(cast(nn.Module, engine.model), folder, path)
    change = scheduler.change(lambda: engine.put_weights(tensors))
    try:
        change.result(seconds)
    except TimeoutError:
        if change.cancel():
            raise
        change.result()  # it has just begun
    return len(tensors)


def new_weights(model: nn.Module, folder: Path, path: str) -> dict[str, Tensor]:
    """The tensors of `path` below `folder`, one for each of the model's. Raises ElsewhereError, and ValueError for what is
    missing, damaged, not the model's or not finite."""
    root = folder.resolve()
    try:
        place = _below(root, root / path)
        if place.is_dir():
            verify_manifest(place)
            place = _below(root, place / WEIGHTS)
        if place.with_name(f"{place.name}.index.json").is_file():  # which names files beside it
            for shard in place.parent.glob("*"):
                _below(root, shard)
        tensors = read_matching(place, model.state_dict())
    except ElsewhereError:
        raise ElsewhereError(f"path: must be below the folder of weights, got '{path}'") from None
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"path: {str(error).replace(f'{root}/', '')}") from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"path: {path}: tensor '{name}' holds numbers that are not finite")
    return tensors


def _below(root: Path, path: Path) -> Path:
    """Where a path leads, links followed."""
    place = path.resolve()
    if not place.is_relative_to(root):
        raise ElsewhereError
    return place
