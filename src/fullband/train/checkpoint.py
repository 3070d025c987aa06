"""Checkpoints: a folder a step, written beside its place and renamed, so that a kill at any moment leaves the last one whole.

checkpoints/step-00000500/   a model folder (config.json, model.safetensors, tokenizer), optimizer.safetensors,
                             training.json (step, data, schedule and metric state), manifest.json (SHA-256 of each)
checkpoints/last.json        which folder to resume from
checkpoints/best.json        which one had the lowest validation loss
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fullband.data.tokenizers import Tokenizer
from fullband.files import read_tensors, sync_folder, verify_manifest, write_json, write_manifest, write_tensors
from fullband.model import WEIGHTS, FullBandModel

OPTIMIZER, TRAINING, LAST, BEST = "optimizer.safetensors", "training.json", "last.json", "best.json"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run folder."""

    folder: Path

    def save(
        self,
        step: int,
        model: FullBandModel,
        tokenizer: Tokenizer,
        optimizer: dict[str, Tensor],
        training: dict[str, Any],
        keep: int,
        validation_loss: float | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, point last.json (and best.json) to it, delete all but the newest `keep` and the best."""
        name = f"step-{step:08d}"
        place, partial = self.folder / name, self.folder / f".{name}.partial"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (place / "manifest.json").is_file():  # after a resume the same step may come by again; its content is the same
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(place, ignore_errors=True)
            model.save(partial)
            tokenizer.save(partial)
            write_tensors(partial / OPTIMIZER, optimizer)
            write_json(partial / TRAINING, training)
            write_manifest(partial, [p.name for p in partial.iterdir() if p.is_file() and p.name != "manifest.json"])
            os.replace(partial, place)
            sync_folder(self.folder)
        best = self.best()
        if validation_loss is not None and (best is None or validation_loss < best[1]):
            write_json(self.folder / BEST, {"checkpoint": name, "validation_loss": validation_loss})
        write_json(self.folder / LAST, {"checkpoint": name})
        self._prune(keep)
        return place

    def last(self) -> Path | None:
        """The checkpoint to resume from, or None. Raises ValueError naming a damaged pointer."""
        pointer = self._pointer(LAST)
        return self.folder / pointer["checkpoint"] if pointer else None

    def best(self) -> tuple[Path, float] | None:
        """The checkpoint of the lowest validation loss, and that loss."""
        pointer = self._pointer(BEST)
        return (self.folder / pointer["checkpoint"], float(pointer["validation_loss"])) if pointer else None

    def load_training(self, checkpoint: Path, model: FullBandModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Put the weights into `model`; returns (optimizer tensors, training.json). Raises ValueError naming a damaged file."""
        verify_manifest(checkpoint)
        model.load_weights(checkpoint / WEIGHTS)
        training = json.loads((checkpoint / TRAINING).read_text(encoding="utf-8"))
        return read_tensors(checkpoint / OPTIMIZER), training

    def _pointer(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            pointer = json.loads(path.read_text(encoding="utf-8"))
            pointer["checkpoint"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: damaged ({error}); delete it and name a checkpoint with train.initial_checkpoint") from None
        return dict(pointer)

    def _prune(self, keep: int) -> None:
        best = self.best()
        spared = {best[0].name} if best else set()
        complete = sorted(p for p in self.folder.glob("step-*") if p.is_dir())
        for old in complete[:-keep]:
            if old.name not in spared:
                shutil.rmtree(old, ignore_errors=True)
        for stray in self.folder.glob(".step-*.partial"):
            shutil.rmtree(stray, ignore_errors=True)
