"""What a run would be refused for later: asked before its first step, by `train` and by a dry run alike."""

from __future__ import annotations

import os
from pathlib import Path

from fullband.config import ChatSource, Recipe
from fullband.data.batch import Batch
from fullband.data.loader import Loader
from fullband.files import check_place
from fullband.loading import LoadedModel
from fullband.optim.wsd import wsd_factor
from fullband.training.metrics import check_tracker

LONGEST_NAME = 255  # bytes of a file's name, on the file systems that there are


def check_run(recipe: Recipe, loader: Loader, model: LoadedModel) -> list[Batch]:
    """The run's held-out batches, empty if it has no validation. `model` may be on the meta device.

    Raises ValueError naming the key for what a step, a validation or the adaptive schedule of this run would be refused for.
    """
    optim, evaluation = recipe.optim, recipe.evaluation
    wsd_factor(0, recipe.train.steps, optim.warmup_steps, optim.cooldown, optim.cooldown_shape)
    check_tracker(recipe.train.tracker)
    if recipe.feedback.prefix == "answer" and not isinstance(recipe.data.source, ChatSource):
        raise ValueError("feedback.prefix: 'answer' needs data that say where answers begin (data.source.kind chat)")
    held_out = loader.validation_batches(evaluation.rows, evaluation.batch_rows) if evaluation.rows else []
    if not recipe.feedback.feeds_back:
        return held_out
    if "converged" in evaluation.feedback_passes and held_out:
        if any(batch.plain is not None for batch in held_out):
            raise ValueError("evaluation.feedback_passes: must be 0, 1, 2, … or 'exact' for chat data, got 'converged'")
        if not model.trunk.can_crop_cache:
            raise ValueError(
                "evaluation.feedback_passes: must be 0, 1, 2, … or 'exact' "
                "for a model with recurrent layers, whose cache cannot be cropped, got 'converged'"
            )
    if recipe.feedback.control == "shuffled":
        _check_shuffled(recipe, held_out)
    return held_out


def _check_shuffled(recipe: Recipe, held_out: list[Batch]) -> None:
    """Another row's state needs another row, wherever passes are run."""
    needs = "feedback.control: 'shuffled' takes states from another sequence and needs at least two at a time: "
    if (recipe.train.microbatch_rows or recipe.train.batch_rows) < 2:
        raise ValueError(f"{needs}{'train.microbatch_rows' if recipe.train.microbatch_rows else 'train.batch_rows'} is 1")
    if recipe.feedback.adaptive and recipe.feedback.adaptive.rows < 2:
        raise ValueError(f"{needs}feedback.adaptive.rows is 1")
    if any(batch.tokens.shape[0] < 2 for batch in held_out) and any(passes != 0 for passes in recipe.evaluation.feedback_passes):
        rows = sum(batch.tokens.shape[0] for batch in held_out)
        raise ValueError(f"{needs}{rows} held-out sequences in batches of {recipe.evaluation.batch_rows} leave one alone")


def check_run_folder(folder: Path) -> None:
    """Raises ValueError if a run's files can't be written there."""
    if "\0" in str(folder):
        raise ValueError("output: a name can't hold the character NUL")
    for part in folder.parts:
        if len(os.fsencode(part)) > LONGEST_NAME:
            raise ValueError(f"{part[:40]}…: a name of {len(os.fsencode(part))} bytes; file systems take {LONGEST_NAME}")
    try:
        check_place(folder)
    except ValueError as error:
        raise ValueError(f"{folder}: cannot write the run folder ({str(error).partition('(')[2]}") from None
