"""Attach latent feedback to a model that exists, and take it off again: in memory, and from folder to folder."""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from fullband.config import FilesSource
from fullband.data.files import Files
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import load_tokenizer
from fullband.feedback.by_passes import top_states
from fullband.files import new_folder
from fullband.hf import card
from fullband.hf.config import FullBandConfig
from fullband.hf.model import FullBandForCausalLM
from fullband.hf.source import check_tokenizer, copy_files, find_source, first_sentence, load_source
from fullband.hf.tokenizer import export_tokenizer, padding_id
from fullband.model import CONFIG, FullBandModel, resolve_model_folder
from fullband.trunk.huggingface import HuggingFaceTrunk, check_cut, check_model
from fullband.trunk.huggingface.check import evaluating
from fullband.trunk.protocol import Trunk

DEFAULT_FUSION = "residual"
CALIBRATION_TOKENS = 65_536  # of a text: enough for a root mean square to three digits
LENGTH = 24  # tokens a row on which the source and the converted model are compared
OURS = ("latent_feedback_mode", "feedback_passes")  # what a generation config holds for feedback alone


@dataclass(frozen=True)
class Conversion:
    """What `convert` made.

    source           the name that was given
    output           the folder
    kind             model type of the source; "fullband" for an exported App. A model
    fusion           its name; `trained` says whether it came with the source
    parameters       of the whole model, and of the fusion in it
    dtype            of the weights
    embedding_scale  root mean square to which fused inputs are brought; None for an App. A model, which has a norm for it
    has_tokenizer    whether the folder has one that transformers can read
    """

    source: str
    output: str
    kind: str
    fusion: str
    trained: bool
    parameters: int
    fusion_parameters: int
    dtype: str
    embedding_scale: float | None
    has_tokenizer: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def attach(model: PreTrainedModel, fusion: str = DEFAULT_FUSION, **config: Any) -> FullBandForCausalLM:
    """`model` (any decoder-only causal LM) with latent feedback: its weights are used as they are, not copied, not cast.

    fusion  gated, concat, add or residual; a residual one starts at zero, so that nothing changes before it is trained
    config  more of `FullBandConfig`: latent_feedback_mode, feedback_passes, feedback, training_steps

    Without feedback it computes what the source computes, bit for bit. Raises ValueError in one sentence for a model that can't be a trunk,
    or on which a pass with feedback does not run. Warns where feedback reaches less far than the source's context
    (`trunk.huggingface.rope`).
    """
    if isinstance(model, FullBandForCausalLM):
        raise ValueError("this model has latent feedback already; fullband.detach gives its trunk")
    known = [name for name in inspect.signature(FullBandConfig.__init__).parameters if name not in ("self", "kwargs")]
    if unknown := [name for name in config if name not in known]:
        nearest = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)[0]
        raise ValueError(f"attach: unknown setting '{unknown[0]}'; did you mean '{nearest}'?")
    found = check_model(model)
    settings = FullBandConfig(trunk_config=copy.deepcopy(model.config), fusion=fusion, **asdict(found), **config)
    converted = FullBandForCausalLM(settings, lm=model)
    converted.connection.to(device=model.device, dtype=model.dtype)
    trunk = _trunk(converted)
    trunk.embedding_scale = trunk.embedding_scale.to(model.device)
    trunk.calibrate()
    if model.generation_config is not None:
        converted.generation_config = copy.deepcopy(model.generation_config)
    check_cut(trunk)
    with evaluating(converted):
        _check_fused(converted)
    if trunk.context_note:
        warnings.warn(f"with latent feedback the context is {trunk.context} tokens{trunk.context_note}", stacklevel=2)
    return converted.train(model.training)


def detach(model: FullBandForCausalLM) -> PreTrainedModel:
    """The plain Hugging Face model inside, its weights not copied. Raises ValueError if the trunk is an App. A decoder."""
    if model.config.trunk_config is None:
        raise ValueError("this model's trunk is an App. A decoder, not a Hugging Face model: there is nothing to detach to")
    lm = _trunk(model).lm
    if model.generation_config is not None:
        lm.generation_config = settings = copy.deepcopy(model.generation_config)
        for name in OURS:
            settings.__dict__.pop(name, None)
    return lm


def convert(
    source: str | Path,
    output: str | Path,
    fusion: str | None = None,
    *,
    calibrate: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    force: bool = False,
) -> Conversion:
    """Make the folder `output` of a Hugging Face checkpoint with latent feedback attached, or of an App. A model in the same format.

    source     a model folder, a hub id, or a model or run folder of ours, which is exported with the fusion it has
    fusion     None = residual
    calibrate  text files over which the embedding scale is measured; none = over the vocabulary
    dtype      None = the source's own; another one rounds the weights
    force      replace `output` if it is a model folder

    The folder appears when it is whole. Raises ValueError in one line for a source that can't be converted, for another model's tokenizer,
    and for an output that exists or cannot be written.
    """
    output = Path(output)
    check_output(source, output, force)
    if native := _native_folder(source):
        if fusion is not None or calibrate:
            raise ValueError(f"{source}: has a fusion already and is exported as it is; leave out {'fusion' if fusion else 'calibrate'}")
        return _export(native, str(source), output, dtype, force)
    found = find_source(source)
    if found.kind == "fullband":
        raise ValueError(f"{source}: is a full-bandwidth model already; `fullband detach` gives its trunk back")
    lm = load_source(found, dtype)
    model = attach(lm, fusion or DEFAULT_FUSION)
    trunk = _trunk(model)
    tokens = _sample_tokens(trunk)
    expected = _logits(lm, tokens)
    _check_standard(model, tokens, expected)
    with new_folder(output, replace=force) as folder:
        copy_files(found, folder)
        has_tokenizer = check_tokenizer(found, folder, trunk.vocab_size)
        if calibrate:
            if not has_tokenizer:
                raise ValueError(f"{source}: has no tokenizer, so there are no tokens to calibrate on")
            trunk.calibrate(calibration_tokens(calibrate, load_tokenizer(folder)))
        assert model.config.trunk_config is not None
        model.config.trunk_config.name_or_path = ""  # where the source was on this machine is nobody's business
        model.save_pretrained(folder)
        card.write_card(folder, output.name, model.config, found)
    return _conversion(model, str(source), output, found.kind, has_tokenizer)


def detach_folder(source: str | Path, output: str | Path, force: bool = False) -> PreTrainedModel:
    """Write the plain Hugging Face checkpoint inside a converted model, with its tokenizer, to `output`. Errors are `convert`'s."""
    output = Path(output)
    check_output(source, output, force)
    found = find_source(source)
    if found.kind != "fullband" or not found.config.get("trunk_config"):
        inside = "an App. A model" if found.kind == "fullband" else f"a plain '{found.kind}' checkpoint"
        raise ValueError(f"{source}: is {inside}; only a converted model has a Hugging Face trunk to detach")
    lm = detach(load_converted(found.name))
    with new_folder(output, replace=force) as folder:
        copy_files(found, folder)
        lm.save_pretrained(folder)
    return lm


def load_converted(
    name: str | Path, dtype: torch.dtype | None = None, configure: Callable[[FullBandConfig], None] | None = None
) -> FullBandForCausalLM:
    """The model saved under this name, on the CPU, in evaluation mode; `dtype` None = as it was saved. `configure` as in `load_source`.

    Raises ValueError naming a weight that is missing or does not fit, and a config that means nothing.
    """
    try:
        config = FullBandConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{name}: its config cannot be read: {first_sentence(error)}") from None
    if configure:
        configure(config)
    try:
        model: FullBandForCausalLM = FullBandForCausalLM.from_pretrained(name, config=config, dtype=dtype or "auto")
    except RuntimeError as error:
        raise ValueError(f"{name}: its weights cannot be read: {first_sentence(error)}") from None
    return model.eval()


def check_output(source: str | Path, output: Path, force: bool) -> None:
    """Raises ValueError for a folder that exists; with `force`, for the source itself, and for one that does not look like a model."""
    if not os.path.lexists(output):
        return
    if Path(source).exists() and os.path.samefile(source, output):
        raise ValueError(f"{output}: is the source itself, which would be lost; give another folder")
    if not force:
        raise ValueError(f"{output}: exists already; give another folder, or --force to replace it")
    if not output.is_dir() or (any(output.iterdir()) and not (output / CONFIG).is_file()):
        raise ValueError(f"{output}: is not a model folder, so it is not replaced; give another one")


def calibration_tokens(paths: Sequence[str], tokenizer: Tokenizer) -> Tensor:
    """The first ids [N] of text files. Raises ValueError for files that can't be read or hold no text."""
    ids: list[int] = []
    for _, text in Files(FilesSource(paths=list(paths), validation_fraction=0.0)).documents("train"):
        ids += tokenizer.begin(text)
        if len(ids) >= CALIBRATION_TOKENS:
            break
    if not ids:
        raise ValueError(f"{', '.join(paths)}: no text to calibrate on")
    return torch.tensor(ids[:CALIBRATION_TOKENS])


def _trunk(model: FullBandForCausalLM) -> HuggingFaceTrunk:
    assert isinstance(model.trunk, HuggingFaceTrunk)
    return model.trunk


def _native_folder(source: str | Path) -> Path | None:
    """The App. A model that `source` names, if it does: a model folder, or a run folder's newest checkpoint."""
    if not Path(source).is_dir():
        return None
    try:
        folder = resolve_model_folder(source)
        config = find_source(folder).config
    except ValueError:
        return None  # whoever reads it as a Hugging Face checkpoint will say what is wrong
    return folder if config["model_type"] == "fullband" and config.get("trunk") else None


def _export(native: Path, source: str, output: Path, dtype: torch.dtype | None, force: bool) -> Conversion:
    """An App. A model in the same format: the same weights under the same names."""
    trained = FullBandModel.load(native, dtype=dtype)
    tokenizer = load_tokenizer(native)
    own = trained.config
    settings = FullBandConfig(trunk=own.trunk.model_dump(), connection=own.connection.model_dump(), feedback_passes=own.feedback_passes)
    model = FullBandForCausalLM(settings)
    torch.nn.Module.to(model, next(trained.parameters()).dtype).eval()
    _, unexpected = model.load_state_dict(trained.state_dict(), strict=False)
    assert not unexpected, unexpected
    stops = sorted(tokenizer.stops)
    model.generation_config = GenerationConfig(eos_token_id=stops or None, pad_token_id=padding_id(tokenizer))
    tokens = _sample_tokens(trained.trunk)
    _check_standard(model, tokens, _native_logits(trained, tokens))
    with new_folder(output, replace=force) as folder:
        tokenizer.save(folder)
        has_tokenizer = export_tokenizer(tokenizer, folder, trained.trunk.context)
        model.save_pretrained(folder)
        card.write_card(folder, output.name, settings, None)
    return _conversion(model, source, output, "fullband", has_tokenizer)


@torch.no_grad()
def _logits(lm: PreTrainedModel, tokens: Tensor) -> Tensor:
    return lm(input_ids=tokens, use_cache=False).logits


@torch.no_grad()
def _native_logits(model: Any, tokens: Tensor) -> Tensor:
    return model.trunk.head(top_states(model, tokens))


@torch.no_grad()
def _check_fused(model: FullBandForCausalLM) -> None:
    """Raises ValueError if a feedback pass does not run, or its states are not numbers where those of a plain one are."""
    tokens = _sample_tokens(model.trunk).to(model.device)
    kind = _trunk(model).lm.config.model_type
    try:
        plain, fused = (top_states(model, tokens, passes) for passes in (0, 1))
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"'{kind}' cannot be a trunk: a pass with feedback does not run ({first_sentence(error)})") from None
    if bool(plain.isfinite().all()) and not bool(fused.isfinite().all()):
        dtype = str(plain.dtype).removeprefix("torch.")
        raise ValueError(f"'{kind}' cannot be a trunk: its states with feedback overflow in {dtype}; give the model in bfloat16 or float32")


def _check_standard(model: FullBandForCausalLM, tokens: Tensor, expected: Tensor) -> None:
    """Law 1, checked on the very model that is saved. Raises ValueError."""
    found = _native_logits(model, tokens)
    if not torch.equal(found, expected):
        apart = float((found.double() - expected.double()).abs().max())
        raise ValueError(f"standard mode would not be the source, bit for bit: logits differ by up to {apart:.1e}; nothing was written")


def _sample_tokens(trunk: Trunk) -> Tensor:
    """Ids [2, LENGTH], or fewer if the context is shorter, spread over the vocabulary."""
    return (torch.arange(2 * LENGTH) * 7919 % trunk.vocab_size).view(2, LENGTH)[:, : trunk.context]


def _conversion(model: FullBandForCausalLM, source: str, output: Path, kind: str, has_tokenizer: bool) -> Conversion:
    native = model.config.trunk_config is None
    return Conversion(
        source=source,
        output=str(output),
        kind=kind,
        fusion=model.config.connected.fusion or DEFAULT_FUSION,
        trained=native,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        fusion_parameters=sum(parameter.numel() for parameter in model.connection.parameters()),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        embedding_scale=None if native else float(_trunk(model).embedding_scale),
        has_tokenizer=has_tokenizer,
    )
