"""The model of a recipe: new, made from a Hugging Face model or a saved one, or as a checkpoint left it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullband.config import ModelConfig, Recipe
from fullband.data.batch import PADDING
from fullband.data.loader import Loader
from fullband.feedback_config import ConnectionConfig
from fullband.files import verify_manifest
from fullband.loading import LoadedModel
from fullband.model import FullBandModel, SavedConfig, is_converted, read_json_config, resolve_model_folder
from fullband.presets import extend_context, resolve_trunk

LENGTHS = ("context", "rope_base", "rope")  # of a trunk's shape: what may differ from the checkpoint that a run starts from


def build_model(recipe: Recipe, loader: Loader, checkpoint: Path | None = None) -> LoadedModel:
    """The recipe's model, ready to train: as `checkpoint` left it, or for a fresh run (None) initialised from its seed, converted from its
    source, or with the weights of `train.initial_checkpoint`.

    Raises ValueError if it does not fit the recipe's data or settings.
    """
    origin = recipe.origin
    model: LoadedModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if origin is None:
            model = _native(recipe, loader, checkpoint)
        elif checkpoint is not None:
            model = _saved(checkpoint, ModelConfig())
        else:
            model = _from_origin(origin, recipe, loader)
    trunk = model.trunk
    if loader.vocab_size > trunk.vocab_size:
        raise ValueError(f"model.trunk.vocab_size: {trunk.vocab_size} is smaller than the tokenizer's {loader.vocab_size}")
    if recipe.data.length > trunk.context:
        raise ValueError(
            f"data.length: must be at most the model's context of {trunk.context}, got {recipe.data.length}{trunk.context_note}"
        )
    if recipe.data.packing and not trunk.can_crop_cache:
        raise ValueError("data.packing: must be false for a model with recurrent layers, which take one document per sequence")
    model.connection.control = recipe.feedback.control
    if isinstance(model, FullBandModel):
        _prepare_native(model, recipe)
    else:
        _prepare_huggingface(model, recipe)
    return model.train()


def save_model(model: LoadedModel, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write the model's files into `folder`, flushed to disk; `weights` are its whole tensors where it is cut over processes. Raises
    OSError if they cannot be written."""
    if isinstance(model, FullBandModel):
        model.save(folder, weights)
        return
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=weights)
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def model_identity(model: LoadedModel, recipe: Recipe) -> dict[str, Any]:
    """What a resumed run's model must have in common with the one that was stopped."""
    if isinstance(model, FullBandModel):
        return model.config.model_dump(exclude={"feedback_passes"})
    return recipe.model.model_dump(mode="json") | {"connection": model.config.connection}


def current_model_identity(before: dict[str, Any]) -> dict[str, Any]:
    """The identity of a model that was saved before connections, in today's keys."""
    if "connection" in before or "fusion" not in before:
        return before
    if "model_type" in before:
        return SavedConfig.model_validate(before).model_dump(exclude={"feedback_passes"})
    rest = {key: value for key, value in before.items() if key != "fusion"}
    return rest | {"connection": ConnectionConfig(fusion=before["fusion"]).model_dump()}


def difference(name: str, before: Any, now: Any, there: str, here: str) -> str:
    """Every value that differs, by its name; empty if none does. A key that is missing is one whose value is None."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = [difference(str(key), before.get(key), now.get(key), there, here) for key in before | now]
        return ", ".join(part for part in found if part)
    return "" if before == now else f"{name}: {before} {there}, {now} {here}"


def _native(recipe: Recipe, loader: Loader, checkpoint: Path | None) -> FullBandModel:
    model = FullBandModel(resolve_trunk(recipe.model, loader.vocab_size), recipe.connection)
    if checkpoint is not None:
        return model  # `Run.restore` reads the weights, once it has compared the runs
    if recipe.train.initial_checkpoint:
        start = FullBandModel.load(recipe.train.initial_checkpoint)
        before, now = (one.config.model_dump(exclude={"feedback_passes"}) for one in (start, model))
        for key in LENGTHS:
            now["trunk"][key] = before["trunk"][key]
        if change := difference("model", before, now, "there", "in the recipe"):
            raise ValueError(f"{recipe.train.initial_checkpoint}: not the recipe's model ({change})")
        model.load_state_dict(start.state_dict())
    return model


def _from_origin(origin: str, recipe: Recipe, loader: Loader) -> LoadedModel:
    """A saved model as it is, or a Hugging Face causal LM with a fusion attached, its fused inputs scaled to the training text."""
    place = resolve_model_folder(origin) if Path(origin).is_dir() else None
    if place and read_json_config(place).get("model_type") == "fullband":
        model = _saved(place, recipe.model)
        own: Any = model.config.connection
        own = own if isinstance(own, dict) else own.model_dump()
        wanted = recipe.feedback.connection.model_dump(exclude_unset=True, exclude_none=True)
        if change := ", ".join(f"its {key} is {own[key]}, the recipe's {value}" for key, value in wanted.items() if own[key] != value):
            raise ValueError(f"{origin}: feedback.connection: {change}")
        return model
    from fullband.hf.context import extend_source
    from fullband.hf.convert import attach
    from fullband.hf.source import find_source, load_source

    lm = load_source(find_source(place or origin), torch.float32, lambda config: extend_source(config, recipe.model))
    converted: Any = attach(lm, connection=recipe.connection.model_dump())
    state = loader.state_dict()
    batch = loader.next_batch()
    loader.load_state_dict(state)
    converted.trunk.calibrate(batch.tokens[batch.documents != PADDING])
    return cast(LoadedModel, converted)


def _saved(folder: Path, extension: ModelConfig) -> LoadedModel:
    """The model of a full-band model folder, with its context extended."""
    verify_manifest(folder)
    if not is_converted(folder):
        start = FullBandModel.load(folder)
        trunk = extend_context(start.config.trunk, extension)
        model = FullBandModel(trunk, start.config.connection, start.config.feedback_passes)
        model.load_state_dict(start.state_dict())
        return model
    from fullband.hf.context import extend_source
    from fullband.hf.convert import load_converted

    return load_converted(folder, torch.float32, lambda config: extend_source(config.trunk_config, extension))


def _prepare_native(model: FullBandModel, recipe: Recipe) -> None:
    model.trunk.activation_checkpointing = recipe.train.activation_checkpointing
    if recipe.train.compile:
        # Few shapes, each compiled for itself: with symbolic ones torch 2.13 generates CPU code that does not compile.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for block in model.trunk.blocks:
            block.compile(dynamic=False)


def _prepare_huggingface(model: Any, recipe: Recipe) -> None:
    """Dropout is switched off: with it, a prefix that is computed once would not be the prefix of another pass."""
    if recipe.train.compile:
        raise ValueError("train.compile: must be false for a Hugging Face trunk")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    if recipe.train.activation_checkpointing:
        if len(model.connection.entries) > 1 and recipe.feedback.feeds_back:
            raise ValueError("train.activation_checkpointing: must be false where states enter a Hugging Face trunk at several depths")
        lm: Any = model.trunk.lm
        newer = hasattr(lm, "activation_checkpointing_enable")  # its name from transformers 5.2x on
        (lm.activation_checkpointing_enable if newer else lm.gradient_checkpointing_enable)({"use_reentrant": False})
