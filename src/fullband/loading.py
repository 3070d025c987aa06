"""Whatever folder somebody names, as a model that everything here takes: an App. A model, a run's newest checkpoint, a converted model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from fullband.model import FullBandModel, is_converted, not_ours, read_json_config, resolve_model_folder

if TYPE_CHECKING:
    from fullband.hf.model import FullBandForCausalLM

LoadedModel: TypeAlias = "FullBandModel | FullBandForCausalLM"


def load_model(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, plain: bool = False
) -> LoadedModel:
    """The model in `folder`, in evaluation mode; `dtype` None = as it was saved.

    folder  of an App. A model, a run (its newest checkpoint) or a converted model. With `plain` also a Hugging Face checkpoint, by folder
            or hub id: it gets a fusion that changes nothing, and `is_standard_only` is true of it (a baseline)

    Only what is needed is imported: transformers for Hugging Face trunks alone. Raises ValueError in one line for anything else, and for
    weights that are missing, damaged or of another shape.
    """
    folder = os.path.expanduser(folder)
    place = Path(folder)
    if plain and not place.is_dir():
        return _load_plain(folder, device, dtype)
    place = resolve_model_folder(place)
    config = read_json_config(place)
    if config.get("model_type") != "fullband":
        if plain:
            return _load_plain(place, device, dtype)
        raise not_ours(place, config)
    if is_converted(place):
        from fullband.hf.convert import load_converted

        return nn.Module.to(load_converted(place, dtype), device)
    return FullBandModel.load(place, device, dtype)


def is_standard_only(model: LoadedModel) -> bool:
    """Whether the model is a plain checkpoint: soft and fused would be standard at a higher price."""
    return bool(getattr(model, "standard_only", False))


def _load_plain(source: str | Path, device: str | torch.device, dtype: torch.dtype | None) -> FullBandForCausalLM:
    from fullband.hf.convert import attach
    from fullband.hf.source import find_source, load_source

    model = attach(load_source(find_source(source), dtype), latent_feedback_mode="standard")
    model.standard_only = True
    return nn.Module.to(model, device).eval()
