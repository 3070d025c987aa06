"""Weights that a trainer puts in the place of the served ones: safetensors below one folder, checked before anything changes."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from fullband.files import verify_manifest
from fullband.model import WEIGHTS, read_matching
from fullband.strict import Strict


class ElsewhereError(ValueError):
    """A path that leads out of the folder of weights."""


class WeightsRequest(Strict):
    """POST /fullband/weights. `path` is a model folder or a safetensors file, below the folder that the server was told."""

    path: str


def new_weights(model: nn.Module, folder: Path, path: str) -> dict[str, Tensor]:
    """The tensors of `path` below `folder`, one for each of the model's. Raises ElsewhereError, and ValueError for what is
    missing, damaged, not the model's or not finite."""
    root = folder.resolve()
    try:
        place = _below(root, root / path)
        if place.is_dir():
            verify_manifest(place)
            place = _below(root, place / WEIGHTS)
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
