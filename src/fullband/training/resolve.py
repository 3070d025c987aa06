"""From a recipe to what its run is made of: everything that the recipe names is found and built once, here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fullband.config import Recipe, ShardsSource, TaskSource, TrunkConfig
from fullband.data.batch import Batch
from fullband.data.build import build_loader
from fullband.data.loader import Loader
from fullband.data.tasks import build_task
from fullband.data.tokenizers import load_tokenizer
from fullband.device import resolve_device
from fullband.feedback.schedule import PassSchedule
from fullband.feedback_config import FeedbackConfig
from fullband.loading import LoadedModel
from fullband.model import resolve_model_folder
from fullband.presets import resolve_trunk
from fullband.training.checks import check_run, check_run_folder
from fullband.training.models import build_model

NO_REUSE = "activation checkpointing of this trunk drops its cache: every pass computes whole sequences, without prefix reuse"


@dataclass(frozen=True)
class Resolved:
    """
    feedback   as this model trains it: later passes start at few places where blocks are compiled, and prefixes are not reused where the
               trunk can't keep a cache
    held_out   batches for validation; empty = none
    notices    what differs from what the recipe might lead one to expect
    """

    recipe: Recipe
    device: torch.device
    loader: Loader
    model: LoadedModel
    feedback: FeedbackConfig
    held_out: list[Batch]
    notices: list[str]

    def schedule(self) -> PassSchedule:
        return PassSchedule(self.feedback, self.recipe.train.steps, self.recipe.seed)


def resolve(recipe: Recipe, checkpoint: Path | None = None, dry: bool = False) -> Resolved:
    """What training `recipe` takes: from the start, or from where `checkpoint` left it.

    dry   a model that is new has shapes but no values, and takes no memory
    Raises ValueError naming the key for all that the run would be refused for, now or at a later step.
    """
    # 1. Where it runs, and where it is kept.
    device = resolve_device(recipe.train.device)
    check_run_folder(recipe.folder)

    # 2. Data, read with the tokenizer that the recipe names or that comes with the model.
    recipe = with_tokenizer(recipe, checkpoint)
    loader = build_loader(recipe.data, recipe.seed, recipe.train.batch_rows)

    # 3. The model: new, converted, or as a checkpoint left it.
    has_values = not dry or recipe.train.initial_checkpoint or recipe.origin
    with torch.device("cpu" if has_values else "meta"):
        model = build_model(recipe, loader, checkpoint)

    # 4. Feedback, as this model can train it.
    feedback, notices = recipe.compiled_feedback, loader.notices()
    if feedback.reuse and not model.trunk.supports_prefix_reuse:
        feedback = feedback.model_copy(update={"reuse": False})
        notices.append(NO_REUSE)

    # 5. Held-out batches, and all that a later step would be refused for.
    held_out = check_run(recipe, loader, model)
    return Resolved(recipe, device, loader, model, feedback, held_out, notices)


def with_tokenizer(recipe: Recipe, checkpoint: Path | None = None) -> Recipe:
    """The recipe with the tokenizer named that comes with its model, or with the `checkpoint` it has come to. A model of its own shape has
    none: then it is that of tokenised shards, else bytes. Raises ValueError if there is no such model."""
    if recipe.data.tokenizer != "auto":
        return recipe
    folder = None if recipe.origin is None else checkpoint or _folder_of(recipe.origin)
    source = recipe.data.source
    own = str(source.folders[0]) if isinstance(source, ShardsSource) else "bytes"
    data = recipe.data.model_copy(update={"tokenizer": own if folder is None else str(folder)})
    return recipe.model_copy(update={"data": data})


def shape_of(recipe: Recipe) -> TrunkConfig:
    """The trunk that a recipe trains, its vocabulary filled in by the tokenizer: without it, if it is not here and the shape is whole.
    No data are read. Raises ValueError for a recipe whose model comes from elsewhere."""
    if recipe.origin:
        raise ValueError(f"the recipe's model comes from {recipe.origin}: see `fullband train RECIPE --dry-run`, or `fullband info FOLDER`")
    if isinstance(recipe.data.source, TaskSource):
        return resolve_trunk(recipe.model, build_task(recipe.data.source).vocab_size)
    try:
        vocab_size = load_tokenizer(with_tokenizer(recipe).data.tokenizer).vocab_size
    except ValueError as missing:
        try:
            return resolve_trunk(recipe.model)
        except ValueError:
            raise missing from None
    return resolve_trunk(recipe.model, vocab_size)


def _folder_of(origin: str) -> Path:
    if Path(origin).is_dir():
        return resolve_model_folder(origin)
    from fullband.hf.source import find_source

    return find_source(origin).folder
