"""FullBandModel = trunk + fusion; saved as safetensors and JSON."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullband.config import FusionName, Strict, TrunkConfig, parse
from fullband.feedback.fusion import Fusion, build_fusion
from fullband.files import MANIFEST, read_tensors, verify_manifest, write_json, write_manifest, write_tensors
from fullband.run_folder import CHECKPOINTS, newest_checkpoint
from fullband.trunk.decoder import Decoder

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TRAINER_STATE = "progress."  # how far a trainer of transformers had come: in exported models, and of no use here


class SavedConfig(Strict):
    """config.json of a model folder."""

    model_type: str = "fullband"
    trunk: TrunkConfig
    fusion: FusionName = "gated"


class FullBandModel(nn.Module):
    """A trunk and the fusion that feeds its top state back. Without feedback it is the trunk, bit for bit (law 1)."""

    trunk: Decoder
    fusion: Fusion

    def __init__(self, trunk: TrunkConfig, fusion: FusionName = "gated"):
        super().__init__()
        self.config = SavedConfig(trunk=trunk, fusion=fusion)
        self.trunk = Decoder(trunk)
        self.fusion = build_fusion(fusion, trunk.width)

    def logits(self, states: Tensor) -> Tensor:
        """[..., V] from top states [..., D]."""
        return nn.functional.linear(states, self.trunk.head_weight)

    def save(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and manifest.json into `folder`, which is created.

        Each file is written beside its place, flushed to disk and renamed. The tokenizer saves itself there too.
        The old manifest goes first: killed halfway, a folder that is saved again would fail its check although all its files are whole.
        """
        folder = Path(folder)
        if any(type(parameter.data) is not Tensor for parameter in self.parameters()):
            raise ValueError("a quantised model cannot be saved; save the one it was made from")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        write_json(folder / CONFIG, self.config.model_dump())
        write_tensors(folder / WEIGHTS, self.state_dict())
        write_manifest(folder, [CONFIG, WEIGHTS])

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> FullBandModel:
        """The model saved in `folder`, or the newest checkpoint of a run folder. Evaluation mode.

        Raises ValueError naming the file for a folder that is not a model, a damaged file or tensors of another shape.
        """
        folder = resolve_model_folder(folder)
        verify_manifest(folder)
        saved = read_config(folder)
        model = cls(saved.trunk, saved.fusion).to(dtype=dtype)  # before the weights, or float64 would pass through float32
        model.load_weights(folder / WEIGHTS)
        return model.to(device=device).eval()

    def load_weights(self, path: Path) -> None:
        """Raises ValueError naming file and tensor if the file is damaged or of another shape."""
        tensors = {name: tensor for name, tensor in _read_weights(path).items() if not name.startswith(TRAINER_STATE)}
        own = self.state_dict()
        for name in sorted(own.keys() | tensors.keys()):
            if name not in tensors:
                raise ValueError(f"{path}: tensor '{name}' is missing")
            if name not in own:
                raise ValueError(f"{path}: tensor '{name}' does not belong to this model")
            if own[name].shape != tensors[name].shape:
                shapes = f"{list(tensors[name].shape)}, this model needs {list(own[name].shape)}"
                raise ValueError(f"{path}: tensor '{name}' has shape {shapes}")
        self.load_state_dict(tensors)


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of `path`, or of the files that transformers wrote in its place, which an index names. ValueError names the file."""
    index = path.with_name(f"{path.name}.index.json")
    if path.is_file() or not index.is_file():
        return read_tensors(path)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{index}: damaged: it does not say where the weights are") from None
    return {key: tensor for name in names for key, tensor in read_tensors(path.with_name(str(name))).items()}


def read_config(folder: Path) -> SavedConfig:
    """config.json of an App. A model's folder. Raises ValueError naming the file."""
    path, raw = folder / CONFIG, read_json_config(folder)
    if raw.get("model_type") != "fullband":
        raise not_ours(folder, raw)
    if is_converted(folder):
        raise ValueError(f"{path}: a converted Hugging Face model, not an App. A one; fullband.load_model reads both")
    if "transformers_version" in raw:  # an exported model: transformers adds keys of its own
        raw = {key: raw[key] for key in SavedConfig.model_fields if key in raw}
    return parse(SavedConfig, raw, str(path))


def not_ours(folder: Path, config: dict[str, Any]) -> ValueError:
    """What to say of a model folder that is another library's."""
    kind = config.get("model_type")
    if not kind:
        return ValueError(f"{folder / CONFIG}: not a fullband model")
    convert = f"convert it first: fullband convert {shlex.quote(str(folder))} -o DIR"
    return ValueError(f"{folder / CONFIG}: a plain '{kind}' checkpoint, without a fusion; {convert}")


def read_json_config(folder: Path) -> dict[str, Any]:
    """config.json of any model folder, as it is. Raises ValueError naming the file if it is no JSON object."""
    path = folder / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: not a fullband model")
    return raw


def is_converted(folder: Path) -> bool:
    """Whether a model folder holds a converted model, whose trunk is a Hugging Face model. Raises ValueError naming a damaged config."""
    config = read_json_config(folder)
    return config.get("model_type") == "fullband" and bool(config.get("trunk_config"))


def resolve_model_folder(folder: str | Path) -> Path:
    """`folder` if it is a model, else the newest checkpoint of the run it holds. Raises ValueError if it is neither."""
    folder = Path(os.path.expanduser(folder))
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such model folder")
    if (folder / CONFIG).is_file():
        return folder
    if newest := newest_checkpoint(folder / CHECKPOINTS):
        return newest
    raise ValueError(f"{folder}: not a model folder (it has no {CONFIG}) and not a run folder (it has no checkpoints)")
