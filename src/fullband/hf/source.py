"""The checkpoint somebody has: a folder or a hub id, opened as a plain transformers model, and the files that come with it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fullband.data.subword import HuggingFaceTokenizer
from fullband.model import CONFIG, read_json_config, resolve_model_folder

CARD, TOKENIZER = "README.md", "tokenizer.json"
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
)
LICENCE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*")
ALIGNMENT = 64  # bytes: where torch's own memory starts
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """A checkpoint that was named.

    name    as the user gave it
    folder  where its small files are: the folder itself, or the part of the hub's snapshot that is not weights
    hub_id  None for a local folder
    config  its config.json
    """

    name: str
    folder: Path
    hub_id: str | None
    config: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.config.get("model_type"))

    def files(self, patterns: tuple[str, ...]) -> Iterator[Path]:
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns):
                yield path


def find_source(name: str | Path) -> Source:
    """The checkpoint of this name, of a run folder its newest. Raises ValueError in one line if there is none, here or on the hub."""
    text = os.path.expanduser(name)
    folder, hub_id = Path(text), None
    if not folder.is_dir():
        if os.path.lexists(folder) or not _HUB_ID.fullmatch(text):
            raise ValueError(f"{text}: no such model folder")
        folder, hub_id = _snapshot(text), text
    elif not (folder / CONFIG).is_file() and (folder / "checkpoints").is_dir():
        folder = resolve_model_folder(folder)
        text = str(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{text}: not a model folder (it has no {CONFIG})")
    config = read_json_config(folder)
    if not config.get("model_type"):
        raise ValueError(f"{folder / CONFIG}: it names no model_type, so it is not the config of a transformers model")
    return Source(text, folder, hub_id, config)


def load_source(source: Source, dtype: torch.dtype | None = None, configure: Callable[[Any], None] | None = None) -> PreTrainedModel:
    """The plain model, in `dtype` (None = its own), on the CPU, in evaluation mode. Code that comes with a checkpoint is never run.

    configure   changes the config in place before the model is made (its rotary positions, for a longer context)

    Raises ValueError in one line for a type transformers does not know or has no causal LM of, and for weights that are missing, damaged or
    of another shape.
    """
    try:
        config = AutoConfig.from_pretrained(source.name, trust_remote_code=False)
    except Exception as error:  # as of weights
        needs_code = " (it needs code of its own, which is not run)" if "auto_map" in source.config else ""
        raise ValueError(f"{source.name}: transformers cannot read its config{needs_code}: {first_sentence(error)}") from None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{source.name}: '{source.kind}' cannot be a trunk: transformers has no causal LM of this type")
    if configure:
        configure(config)
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            source.name,
            config=config,
            dtype=dtype or "auto",
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # unpickling, a package that its quantisation needs, a full memory: no common base
        raise ValueError(f"{source.name}: its weights cannot be read: {first_sentence(error)}") from None
    model, loaded = found
    check_loaded(source.name, loaded)
    check_finite(source.name, model)
    align_weights(model)
    return model.eval()


def align_weights(model: nn.Module) -> None:
    """Lay weights that were loaded out in memory as constructed ones are: each starting on a boundary of 64 bytes.

    safetensors maps a file into memory, where weights start anywhere on 8 bytes, and there BLAS adds in another order: on AMD processors a
    loaded model would differ from the one that was saved, by rounding. What is misaligned is copied, one weight after another; tied ones
    stay tied. The copies are memory of the process's own, as large as the weights; the mapped file is let go.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        held = tensor.data
        if type(held) is Tensor and held.device.type == "cpu" and held.layout == torch.strided and held.data_ptr() % ALIGNMENT:
            tensor.data = held.clone()


def check_loaded(name: str | Path, loaded: dict[str, Any]) -> None:
    """Raises ValueError naming the first weight that is missing or of another shape: transformers would start it at random."""
    for kind, problem in (("missing_keys", "is missing"), ("mismatched_keys", "has another shape than the config says")):
        if keys := sorted(key if isinstance(key, str) else key[0] for key in loaded.get(kind) or ()):
            more = f", and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ValueError(f"{name}: weight '{keys[0]}' {problem}{more}")


def check_finite(name: str | Path, model: nn.Module) -> None:
    """Raises ValueError naming the first weight that holds NaN or infinity: no comparison of logits would mean anything."""
    for key, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            what = "NaN" if bool(parameter.isnan().any()) else "infinity"
            raise ValueError(f"{name}: weight '{key}' holds {what}; the checkpoint is damaged, or its training diverged")


def copy_files(source: Source, folder: Path) -> None:
    """The source's tokenizer, byte for byte, and its licence files. A tokenizer without a tokenizer.json gets one."""
    copied = [shutil.copyfile(path, folder / path.name) for path in source.files((*TOKENIZER_FILES, *LICENCE_FILES))]
    if any(path.name in TOKENIZER_FILES for path in copied) and not (folder / TOKENIZER).is_file():
        try:
            AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False).save_pretrained(folder)
        except Exception as error:  # as of weights
            raise ValueError(f"{source.name}: its tokenizer cannot be read: {first_sentence(error)}") from None


def check_tokenizer(source: Source, folder: Path, vocabulary: int) -> bool:
    """Whether `folder` holds a tokenizer. Raises ValueError if it makes ids that the model's `vocabulary` does not have; added tokens are
    text there."""
    if not (folder / TOKENIZER).is_file():
        return False
    try:
        size = HuggingFaceTokenizer(folder / TOKENIZER, vocabulary=vocabulary).vocab_size
    except ValueError as error:  # it speaks of the copy, in a folder that will be gone
        raise ValueError(str(error).replace(str(folder / TOKENIZER), f"{source.name}: {TOKENIZER}")) from None
    if size > vocabulary:
        raise ValueError(
            f"{source.name}: its tokenizer has {size:,} ids, the model's vocabulary only {vocabulary:,}: this is another model's tokenizer"
        )
    return True


def first_sentence(error: Exception) -> str:
    """The first line of an error of another library, without what transformers adds after it."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    named = "" if isinstance(error, (OSError, ValueError, RuntimeError, ImportError)) else f"{type(error).__name__}: "
    return named + lines[0].strip()[:300] if lines else type(error).__name__


def _snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    from fullband.data.hub import check_hub

    unreachable = check_hub()
    try:
        return Path(snapshot_download(hub_id, allow_patterns=[CONFIG, CARD, *TOKENIZER_FILES, *LICENCE_FILES]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        reason = f"{unreachable}; it is not in the cache" if unreachable else first_sentence(error)
        raise ValueError(f"{hub_id}: no such folder, and the hub did not give it ({reason})") from None
