"""FullBandModel = trunk + connection; saved as safetensors and JSON."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor, nn

from fullband.config import Strict, TrunkConfig, parse
from fullband.decode.modes import run_tokens
from fullband.decode.prefill import prefill_with_states
from fullband.feedback.by_passes import check_feedback_passes, top_states
from fullband.feedback.connection import Connection, connect, current_name
from fullband.feedback.passes import check_length
from fullband.feedback.state import DecodeState
from fullband.feedback_config import ConnectionConfig, FeedbackPasses, FusionName
from fullband.files import MANIFEST, read_tensors, verify_manifest, write_json, write_manifest, write_tensors
from fullband.layout import NOWHERE, Layout
from fullband.run_folder import CHECKPOINTS, newest_checkpoint
from fullband.trunk.decoder import Decoder

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TRAINER_STATE = "progress."  # how far a trainer of transformers had come: in exported models, and of no use here


class SavedConfig(Strict):
    """config.json of a model folder."""

    model_type: str = "fullband"
    trunk: TrunkConfig
    connection: ConnectionConfig = ConnectionConfig(fusion="gated")
    feedback_passes: FeedbackPasses = 0  # of `forward`, where it is not told

    @model_validator(mode="before")
    @classmethod
    def _older_keys(cls, raw: Any) -> Any:
        """Before connections, the fusion's name stood alone and the carried state in the trunk."""
        if not isinstance(raw, dict) or "connection" in raw or not isinstance(raw.get("trunk"), dict):
            return raw
        trunk = {key: value for key, value in raw["trunk"].items() if key != "fed_back"}
        connection = {"fusion": raw.get("fusion", "gated"), "source": raw["trunk"].get("fed_back", "top")}
        return {**{key: value for key, value in raw.items() if key != "fusion"}, "trunk": trunk, "connection": connection}


class ModelOutput(NamedTuple):
    """Logits [B, T or kept, V], the top states [B, T, D] they are made of, and with `use_cache` what the next tokens go on from."""

    logits: Tensor
    states: Tensor
    cache: DecodeState | None = None


class FullBandModel(nn.Module):
    """A trunk and the connection that feeds its states back. Without feedback it is the trunk, bit for bit (law 1).

    connection       None = the paper's: the top state, fused with the next embedding by a gated linear unit; a name = another fusion
    feedback_passes  of `forward`, where it is not told
    """

    trunk: Decoder
    connection: Connection

    def __init__(self, trunk: TrunkConfig, connection: ConnectionConfig | FusionName | None = None, feedback_passes: FeedbackPasses = 0):
        super().__init__()
        given = connection if isinstance(connection, ConnectionConfig) else ConnectionConfig(fusion=connection)
        self.config = SavedConfig(trunk=trunk, connection=given.named("gated"), feedback_passes=feedback_passes)
        self.trunk = Decoder(trunk)
        self.connection = Connection(self.config.connection, trunk.width, trunk.layers, trunk.norm_eps)
        connect(self.trunk, self.connection)

    def forward(
        self,
        tokens: Tensor,
        feedback_passes: FeedbackPasses | None = None,
        layout: Layout = NOWHERE,
        logits_to_keep: int = 0,
        cache: DecodeState | None = None,
        use_cache: bool = False,
    ) -> ModelOutput:
        """Logits of tokens [B, T] after these feedback passes (0 = without feedback, "exact", "converged"; `states_by_passes`).

        feedback_passes  None = the config's, which are 0 unless set
        layout           positions, documents and slots without feedback; by default every sequence is one document
        logits_to_keep   logits of the last n positions only; 0 = all
        use_cache        whether the output has a cache, which goes on from the last tokens; without gradients, and without a layout
        cache            what went before: the tokens then follow it, each fed with the state before it, or with 0 feedback passes without
                         feedback

        So Soft is a prompt with 0 passes and use_cache, then tokens with its cache and "exact". Raises ValueError for tokens beyond the
        context, for other `feedback_passes`, and for a layout beside a cache.
        """
        passes = self.config.feedback_passes if feedback_passes is None else feedback_passes
        if layout is not NOWHERE and (use_cache or cache is not None):
            raise ValueError("a cache is of sequences of one document each: leave out the layout, or the cache")
        after = None
        if cache is not None:
            check_feedback_passes(passes)
            check_length(self, int(cache.positions_B.max()) + tokens.shape[1])
            after, states = run_tokens(self, cache, tokens, feeds_back=passes != 0)
        elif use_cache:
            after, by_row = prefill_with_states(self, tokens, passes)
            states = torch.stack(by_row)
        else:
            states = top_states(self, tokens, passes, layout)
        return ModelOutput(self.trunk.head(states[:, -logits_to_keep:]), states, after if use_cache else None)  # [:, -0:] is all

    def save(self, folder: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write config.json, model.safetensors and manifest.json into `folder`, which is created.

        weights  the model's whole tensors; None = its own
        Each file is written beside its place, flushed to disk and renamed. The tokenizer saves itself there too.
        The old manifest goes first: killed halfway, a folder that is saved again would fail its check although all its files are whole.
        """
        folder = Path(folder)
        if weights is None and any(type(parameter.data) is not Tensor for parameter in self.parameters()):
            raise ValueError("a quantised model cannot be saved; save the one it was made from")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        write_json(folder / CONFIG, self.config.model_dump())
        write_tensors(folder / WEIGHTS, self.state_dict() if weights is None else weights)
        write_manifest(folder, [CONFIG, WEIGHTS])

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> FullBandModel:
        """The model saved in `folder`, or the newest checkpoint of a run folder. Evaluation mode.

        Raises ValueError naming the file for a folder that is not a model, a damaged file or tensors of another shape.
        """
        folder = resolve_model_folder(folder)
        verify_manifest(folder)
        saved = read_config(folder)
        model = cls(saved.trunk, saved.connection, saved.feedback_passes).to(
            dtype=dtype
        )  # before the weights, or float64 would pass through float32
        model.load_weights(folder / WEIGHTS)
        return model.to(device=device).eval()

    def load_weights(self, path: Path) -> None:
        """Raises ValueError naming file and tensor if the file is damaged or of another shape."""
        self.load_state_dict(read_matching(path, self.state_dict()))


def read_matching(path: Path, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file of weights, for those of a model (`own`); of tied ones, which share memory, one will do.

    Raises ValueError naming file and tensor if the file is damaged, or a tensor is missing, not the model's or of another shape."""
    tensors = {current_name(name): tensor for name, tensor in _read_weights(path).items() if not name.startswith(TRAINER_STATE)}
    own = {name: tensor for name, tensor in own.items() if not name.startswith(TRAINER_STATE)}
    given = {own[name].data_ptr() for name in own.keys() & tensors.keys()}
    for name in sorted(own.keys() | tensors.keys()):
        if name not in own:
            raise ValueError(f"{path}: tensor '{name}' does not belong to this model")
        if name not in tensors and own[name].data_ptr() not in given:
            raise ValueError(f"{path}: tensor '{name}' is missing")
        if name in tensors and own[name].shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)}, this model needs {list(own[name].shape)}"
            raise ValueError(f"{path}: tensor '{name}' has shape {shapes}")
    return tensors


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
        raw = {key: raw[key] for key in (*SavedConfig.model_fields, "fusion") if key in raw}  # fusion: before connections
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


def is_exported(folder: Path) -> bool:
    """Whether an App. A model's folder is as `fullband convert` writes it, with a tokenizer that transformers reads and where texts end."""
    return all((folder / name).is_file() for name in ("tokenizer.json", "generation_config.json"))


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
