"""Checkpoints: a folder a step, written beside its place and renamed, so that a kill at any moment leaves the last one whole.

checkpoints/step-00000500/   a model folder (config.json, model.safetensors, tokenizer), optimizer.safetensors,
                             training.json (step, data, schedule and metric state), manifest.json (SHA-256 of each)
checkpoints/last.json        which folder to resume from, the best one so far, and whether that step's validation is still to come
checkpoints/best.json        which one had the lowest validation loss

A folder newer than last.json's is one that was never finished: a run that resumes replaces it when it gets there again. Where last.json is
lost, the newest whole folder is resumed from (`run_folder`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fullband.data.loader import Loader
from fullband.files import MANIFEST, TRAINING, check_place, sync_folder, verify_manifest, write_json, write_manifest, write_tensors
from fullband.loading import LoadedModel
from fullband.run_folder import LAST, NAME, checkpoints_in, named_checkpoint, newest_checkpoint, read_pointer, step_of, whole_checkpoints
from fullband.training.models import save_model

OPTIMIZER, BEST = "optimizer.safetensors", "best.json"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run folder."""

    folder: Path

    def save(
        self,
        step: int,
        model: LoadedModel,
        loader: Loader,
        optimizer: Mapping[str, Tensor],
        training: dict[str, Any],
        best: dict[str, Any] | None,
        keep: int,
        pending: bool = False,
        unlogged: dict[str, Any] | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, point last.json to it and best.json to `best`, delete all but the newest `keep` and the best.

        pending    whether the step's validation is still to come: a run that resumes here begins with it
        unlogged   what could not be logged of the step: a run that resumes here logs it first
        weights    the model's whole tensors, where it is cut over processes

        The step that last.json points to already is not written again. Raises ValueError naming the folder if it cannot be written;
        the checkpoint before it stays whole.
        """
        place = self.folder / checkpoint_name(step)
        partial = self.folder / f".{place.name}.partial"
        last = named_checkpoint(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if last != place:
                shutil.rmtree(partial, ignore_errors=True)
                save_model(model, partial, weights)
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
            to_come: dict[str, Any] = {"pending": True} if pending else {}
            to_come |= {"unlogged": unlogged} if unlogged else {}
            write_json(self.folder / LAST, {"checkpoint": place.name, "best": best} | to_come)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
            whole = f"; {last} is whole: continue from it with --resume" if last else ""
            raise ValueError(f"{place}: the checkpoint could not be saved ({error.strerror or error}){whole}") from None
        self.prune(place, best, keep)
        return place

    def make(self) -> None:
        """Make the folder, before the work that it is for. Raises ValueError naming it if it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.folder}: cannot be written ({error.strerror})") from None
        check_place(self.folder)

    def last(self) -> Path | None:
        """The checkpoint to resume from, or None. Raises ValueError if there are some, and none is whole."""
        return newest_checkpoint(self.folder)

    def best(self) -> tuple[Path, float] | None:
        """The checkpoint of the lowest validation loss, and that loss."""
        best = _best_of(read_pointer(self.folder / BEST))
        return (self.folder / best["checkpoint"], best["validation_loss"]) if best else None

    def standing(self, checkpoint: Path) -> tuple[dict[str, Any] | None, bool, dict[str, Any] | None]:
        """Of the checkpoint that a run resumes from: the best one so far, whether the validation of its step is still to come, and what
        is still to be logged of it."""
        pointer = read_pointer(self.folder / LAST)
        if pointer.get("checkpoint") == checkpoint.name:
            unlogged = pointer.get("unlogged")
            return _best_of(pointer.get("best")), bool(pointer.get("pending")), unlogged if isinstance(unlogged, dict) else None
        best = _best_of(read_pointer(self.folder / BEST))  # last.json is lost
        return (best if best and step_of(Path(best["checkpoint"])) < step_of(checkpoint) else None), True, None

    def read_training(self, checkpoint: Path) -> dict[str, Any]:
        """training.json of a checkpoint, all of whose files are checked first.

        Raises ValueError naming a damaged or missing one, and the newest checkpoint that is whole.
        """
        try:
            verify_manifest(checkpoint)
            return _read_training(checkpoint / TRAINING)
        except ValueError as error:
            whole = next((other for other in whole_checkpoints(self.folder) if other.name != checkpoint.name), None)
            offer = f"; {whole.name} is whole: to go on from it, remove {checkpoint} and resume" if whole else ""
            raise ValueError(f"{error}{offer}") from None

    def prune(self, last: Path, best: dict[str, Any] | None, keep: int) -> None:
        """Delete all but the newest `keep` up to `last`, and the best. A newer one is what a kill left of a save."""
        complete = checkpoints_in(self.folder)
        newest = [p for p in complete if step_of(p) <= step_of(last)][-keep:]
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


def _read_training(path: Path) -> dict[str, Any]:
    """Raises ValueError naming a file that is missing, damaged or of another shape."""
    try:
        training = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or missing ({error})") from None
    kinds: dict[str, type] = dict.fromkeys(("step", "tokens", "token_equivalent", "executed_positions"), int)
    kinds |= dict.fromkeys(("identity", "loader", "schedule", "milestones"), dict)
    for key, kind in kinds.items():
        if not isinstance(training, dict) or not isinstance(training.get(key), kind):
            raise ValueError(f"{path}: not the training state of a run ({key!r} must be {'a number' if kind is int else 'a section'})")
    return dict(training)


def _best_of(raw: Any) -> dict[str, Any] | None:
    """{"checkpoint": name, "validation_loss": nats}, or None where that is not what was recorded."""
    if not isinstance(raw, dict) or not NAME.fullmatch(str(raw.get("checkpoint"))) or not isinstance(raw.get("validation_loss"), float):
        return None
    return raw


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"
