"""Checkpoints: a folder a step, written beside its place and renamed, so that a kill at any moment leaves the last one whole.

checkpoints/step-00000500/   a model folder (config.json, model.safetensors, tokenizer), optimizer.safetensors,
                             training.json (step, data, schedule and metric state), manifest.json (SHA-256 of each)
checkpoints/last.json        which folder to resume from
checkpoints/best.json        which one had the lowest validation loss

A folder newer than last.json's is one that was never finished: a run that resumes replaces it when it gets there again.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fullband.data.loader import Loader
from fullband.files import MANIFEST, sync_folder, verify_manifest, write_json, write_manifest, write_tensors
from fullband.loading import LoadedModel
from fullband.train.models import save_model

OPTIMIZER, TRAINING, LAST, BEST = "optimizer.safetensors", "training.json", "last.json", "best.json"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run folder."""

    folder: Path

    def save(
        self,
        step: int,
        model: LoadedModel,
        loader: Loader,
        optimizer: dict[str, Tensor],
        training: dict[str, Any],
        best: dict[str, Any] | None,
        keep: int,
    ) -> Path:
        """Write the checkpoint of `step`, point last.json to it and best.json to `best`, delete all but the newest `keep` and the best.

        The step that last.json points to already is not written again. Raises ValueError naming the folder if it cannot be written;
        the checkpoint before it stays whole.
        """
        place = self.folder / checkpoint_name(step)
        partial = self.folder / f".{place.name}.partial"
        last = self.last()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if last != place:
                shutil.rmtree(partial, ignore_errors=True)
                save_model(model, partial)
                loader.save(partial)
                write_tensors(partial / OPTIMIZER, optimizer)
                write_json(partial / TRAINING, training)
                write_manifest(partial, [p.name for p in partial.iterdir() if p.is_file() and p.name != MANIFEST])
                _delete(place)
                os.replace(partial, place)
                sync_folder(self.folder)
            if best:
                write_json(self.folder / BEST, best)
            else:
                (self.folder / BEST).unlink(missing_ok=True)
            write_json(self.folder / LAST, {"checkpoint": place.name})
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
            whole = f"; {last} is whole: continue from it with --resume" if last else ""
            raise ValueError(f"{place}: the checkpoint could not be saved ({error.strerror or error}){whole}") from None
        self.prune(place, best, keep)
        return place

    def last(self) -> Path | None:
        """The checkpoint to resume from, or None. Raises ValueError naming a damaged pointer."""
        pointer = self._pointer(LAST)
        return self.folder / pointer["checkpoint"] if pointer else None

    def best(self) -> tuple[Path, float] | None:
        """The checkpoint of the lowest validation loss, and that loss."""
        pointer = self._pointer(BEST)
        return (self.folder / pointer["checkpoint"], float(pointer["validation_loss"])) if pointer else None

    def read_training(self, checkpoint: Path) -> dict[str, Any]:
        """training.json of a checkpoint, all of whose files are checked first. Raises ValueError naming a damaged or missing one."""
        verify_manifest(checkpoint)
        path = checkpoint / TRAINING
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: damaged or missing ({error})") from None

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

    def prune(self, last: Path, best: dict[str, Any] | None, keep: int) -> None:
        """Delete all but the newest `keep` up to `last`, and the best. A newer one is what a kill left of a save."""
        complete = sorted(p for p in self.folder.glob("step-*") if p.is_dir())  # names sort by step
        newest = [p for p in complete if p.name <= last.name][-keep:]
        for old in complete:
            if old not in newest and not (best and old.name == best["checkpoint"]):
                with suppress(OSError):  # the next save tries again
                    _delete(old)
        for stray in self.folder.glob(".step-*"):
            shutil.rmtree(stray, ignore_errors=True)


def _delete(checkpoint: Path) -> None:
    """Renamed first: whatever is called step-… is whole, even if a kill cuts the deletion short."""
    if checkpoint.is_dir():
        hidden = checkpoint.with_name(f".{checkpoint.name}.deleted")
        shutil.rmtree(hidden, ignore_errors=True)
        os.replace(checkpoint, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"
