"""The folder of a full-bandwidth model, as transformers writes and reads it: checked when it is read, never half replaced.

It is the format of `FullBandModel.save` (config.json, safetensors, manifest.json) and more: the generation config, weights in several
files, and a few lines of code by which `trust_remote_code=True` finds fullband.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from fullband.feedback.connection import OLDER_NAMES
from fullband.files import MANIFEST, sync_folder, verify_manifest, write_bytes, write_manifest
from fullband.hf.source import align_weights, check_loaded, first_sentence
from fullband.model import CONFIG, TRAINER_STATE
from fullband.trunk.huggingface import HuggingFaceTrunk, check_cut

CODE = "modeling_fullband.py"
AUTO_MAP = {"AutoConfig": "modeling_fullband.FullBandConfig", "AutoModelForCausalLM": "modeling_fullband.FullBandForCausalLM"}
RENAMED = {rf"^{re.escape(older)}": newer for older, newer in OLDER_NAMES.items()}
SOURCE = '''"""Loads this model, whose code is the package fullband."""

try:
    from fullband.hf import FullBandConfig, FullBandForCausalLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"this model needs the package fullband (pip install 'fullband[hf]'): {error}") from None

__all__ = ["FullBandConfig", "FullBandForCausalLM"]
'''


class SavedModel(PreTrainedModel):
    """`save_pretrained` and `from_pretrained` that keep a model whole."""

    progress: Any  # progress.StepCounter
    generation_config: Any

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers' own, with its arguments. Raises ValueError in one line for a damaged folder and for a weight that is missing,
        not the model's, or of another shape; transformers would start it at random and only log it.

        The weights are laid out in memory as those of a model that was made here, so logits are the same to the bit (`align_weights`)."""
        name = pretrained_model_name_or_path
        local = name is not None and os.path.isdir(name)
        if local:
            verify_manifest(Path(name))
        kwargs["key_mapping"] = RENAMED | (kwargs.get("key_mapping") or {})
        kwargs["ignore_mismatched_sizes"] = True  # they are refused below, in one line
        try:
            both: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        except (SafetensorError, OSError) as error:
            if not local:
                raise
            raise ValueError(f"{name}: cannot be read: {first_sentence(error)}") from None
        model, loaded = both
        check_loaded(name, loaded)
        if (foreign := sorted(loaded.get("unexpected_keys") or ())) and getattr(model, "hf_quantizer", None) is None:
            raise ValueError(f"{name}: weight '{foreign[0]}' does not belong to this model")
        applied = getattr(model, "_weight_conversions", None) or []  # transformers undoes these when the model is saved
        model._weight_conversions = [conversion for conversion in applied if not RENAMED.keys() & set(conversion.source_patterns)]
        align_weights(model)
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            _gather_entry(model)
        if isinstance(model.trunk, HuggingFaceTrunk):
            check_cut(model.trunk)  # the config may have been edited
        return (model, loaded) if output_loading_info else model

    def save_pretrained(  # type: ignore[override]  # transformers' own names more, all passed on
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As transformers' own, with its arguments. The files are written beside the old ones, then take their place, the manifest last: a
        kill leaves the old model, or a folder that its manifest finds damaged, or (of one file of weights) whole files without a manifest.

        Raises ValueError if the folder cannot be written.
        """
        if not is_main_process:
            super().save_pretrained(save_directory, is_main_process=False, **kwargs)  # gathers, writes nothing
            return
        folder = Path(save_directory)
        hub = {name: kwargs.pop(name) for name in ("repo_id", "commit_message", "create_pr", "private") if name in kwargs}
        try:
            with _beside(folder) as partial:
                self._write(partial, kwargs)
                _take_over(partial, folder, kwargs.get("variant"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder}: cannot be written: {first_sentence(error)}") from None
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", folder.name), token=kwargs.get("token"), **hub)

    def _write(self, folder: Path, kwargs: dict[str, Any]) -> None:
        self.config.auto_map = AUTO_MAP
        if getattr(self.config, "trunk_config", None) is not None:
            self.config.trunk_config.dtype = str(self.dtype).removeprefix("torch.")  # as transformers does with its own config's
        self.generation_config._from_model_config = False  # else its latent_feedback_mode would be dropped when it is read
        if not int(self.progress.step):
            weights = kwargs.get("state_dict") or self.state_dict()
            kwargs["state_dict"] = {name: weight for name, weight in weights.items() if not name.startswith(TRAINER_STATE)}
        super().save_pretrained(folder, **kwargs)
        if (folder / CONFIG).is_file():
            write_bytes(folder / CODE, SOURCE.encode())
        for path in folder.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        write_manifest(folder, [path.name for path in folder.iterdir()])

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModelForCausalLM") -> None:
        """Nothing: transformers would copy the source file of this class into every folder that is saved; `CODE` stands there already."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: of custom models transformers takes modules without weights of their own as loaded, and a trunk's constant buffers
        (falcon_h1's multipliers) would stay unset."""
        return False


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """An empty folder inside `folder`; what a killed save has left there goes."""
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _gather_entry(model: Any) -> None:
    """Of a model on several devices, put the fusion where the embedding is: its inputs are mixed there.

    Raises ValueError if the embedding, the head or the fusion has no device of its own (layers may be offloaded, these are read directly).
    """
    from accelerate.hooks import remove_hook_from_module  # dispatching a model needs it, so it is there

    embedding = model.get_input_embeddings().weight
    for part, weight in (
        ("embedding", embedding),
        ("head", model.trunk.head_weight),
        *(("fusion", weight) for weight in model.connection.parameters()),
    ):
        if weight.device.type == "meta":
            raise ValueError(f"device_map: the {part} cannot be offloaded; give it a device, the layers may be anywhere")
    remove_hook_from_module(model.connection, recurse=True)
    model.connection.to(embedding.device)
    if isinstance(scale := getattr(model.trunk, "embedding_scale", None), Tensor):
        model.trunk.embedding_scale = scale.to(embedding.device)


def _take_over(partial: Path, folder: Path, variant: str | None) -> None:
    """Move the files of `partial` into `folder`, the manifest last; weights of an earlier save that no file replaces go."""
    names = sorted(path.name for path in partial.iterdir() if path.name != MANIFEST)
    if not names:  # another rank writes
        return
    suffix = re.escape(f".{variant}" if variant else "")
    weights = re.compile(rf"model{suffix}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index{suffix}\.json")
    old = [path for path in folder.iterdir() if weights.fullmatch(path.name)]
    if len(old) <= 1:
        (folder / MANIFEST).unlink(missing_ok=True)  # any mixture of whole files loads; of several weight files it would be a wrong model
    for path in old:
        if path.name not in names:
            path.unlink()
    for name in names:
        os.replace(partial / name, folder / name)
    sync_folder(folder)
    os.replace(partial / MANIFEST, folder / MANIFEST)
    sync_folder(folder)
