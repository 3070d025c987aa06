"""The recipe: everything a run is, typed and strict. An unknown key is an error that names the nearest known one."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fullband.data_config import (  # noqa: F401  a recipe's sources, under the recipe's name
    ChatSource,
    DataConfig,
    FilesSource,
    HuggingFaceSource,
    ProgramTextSource,
    PythonStdlibSource,
    ShardsSource,
    Source,
    TaskSource,
)
from fullband.feedback_config import (
    MOST_STEPS,
    ConnectionConfig,
    FeedbackConfig,
    FeedbackPasses,
    moved_fusion,
)
from fullband.shipped import find_recipe
from fullband.strict import Place, Strict, parse, read_mapping, read_yaml

Beta = Annotated[float, Field(ge=0, lt=1)]


class Yarn(Strict):
    """YaRN (arXiv:2309.00071): rotary positions for a context `factor` times the `original` one, in tokens.

    Frequencies that turn more than `beta_fast` times within the original context stay, those that turn less than `beta_slow` times are
    divided by the factor, those between are mixed; attention scores are multiplied by (1 + 0.1 ln factor)².
    """

    type: Literal["yarn"] = Field(default="yarn", description="kind of extension")
    factor: float = Field(gt=1, le=1e6, description="how many times longer the context becomes")
    original: int = Field(gt=1, le=2**31, description="context length of the original training")
    beta_fast: float = Field(
        default=32.0, ge=1e-6, le=1e6, description="frequencies with more turns than this within the original context stay unchanged"
    )
    beta_slow: float = Field(default=1.0, ge=1e-6, le=1e6, description="frequencies with fewer turns than this are divided by the factor")

    @model_validator(mode="after")
    def _slow_is_below_fast(self) -> Yarn:
        if self.beta_slow > self.beta_fast:
            raise ValueError(f"beta_slow ({self.beta_slow}) must not be above beta_fast ({self.beta_fast})")
        return self

    @property
    def context(self) -> int:
        return int(self.factor * self.original)


class TrunkConfig(Strict):
    """Shape of the App. A decoder. `head_dim` defaults to width / heads; a window of W keys includes the query's own."""

    vocab_size: int = Field(gt=1, le=2**24, description="size of the vocabulary; default in a recipe: the tokenizer's")
    width: int = Field(gt=0, le=2**17, description="size of a hidden state")
    layers: int = Field(gt=0, le=4096, description="number of decoder layers")
    heads: int = Field(gt=0, le=2**14, description="number of query heads")
    kv_heads: int = Field(gt=0, le=2**14, description="number of key-value heads; must divide heads")
    glu_width: int = Field(gt=0, le=2**20, description="inner width of the feed-forward layer")
    context: int = Field(gt=1, le=2**31, description="maximum sequence length in tokens")
    window: int = Field(gt=0, le=2**31, description="keys that a sliding-window layer attends to, the position's own included")
    full_every: int = Field(
        default=6, gt=0, le=2**31, description="every n-th layer attends to the whole context; 6: layers 6, 12, … counted from 1"
    )
    head_dim: int | None = Field(default=None, gt=0, le=2**14, description="width of a head; default: width / heads")
    rope_base: float = Field(default=10_000.0, ge=1.001, le=1e15, description="base of the rotary frequencies")
    rope: Yarn | None = Field(default=None, description="extension of rotary positions beyond the context of pre-training")
    norm_eps: float = Field(default=1e-6, ge=1e-30, le=1, description="epsilon of the RMS norms")

    @model_validator(mode="after")
    def _shapes_fit(self) -> TrunkConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads}) unless head_dim is given")
        if self.head_size % 2:
            raise ValueError(f"head_dim ({self.head_size}) must be even for rotary positions")
        if self.rope and self.context > self.rope.context:
            raise ValueError(f"context ({self.context}) is longer than rope's factor x original ({self.rope.context})")
        return self

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads

    def layer_is_full(self, layer: int) -> bool:
        """Whether layer `layer` (counted from 0) attends fully."""
        return (layer + 1) % self.full_every == 0


class ModelConfig(Strict):
    """A full-bandwidth model: a preset (see `presets.py`) and its overrides, or a `source`.

    `rope_base`, `rope` and `context` extend the context of either (long-context extension, section 4.2).
    """

    preset: str | None = Field(default=None, description="name of a predefined shape; `fullband info NAME` describes it")
    trunk: dict[str, Any] | TrunkConfig = Field(default_factory=dict, description="changes to the preset, or the whole shape")
    source: Place | None = Field(
        default=None, description="model to start from: a Hugging Face causal LM (folder or hub id) to convert, or a saved model or run"
    )
    rope_base: float | None = Field(default=None, ge=1.001, le=1e15, description="new base of the rotary frequencies, for a longer context")
    rope: Yarn | None = None
    context: int | None = Field(
        default=None, gt=1, le=2**31, description="maximum sequence length; default: as in the model, or rope's factor x original"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if self.source is not None and (self.preset or self.trunk):
            raise ValueError("source: it defines the shape; leave out preset and trunk")
        return self


class OptimConfig(Strict):
    """NorMuon for matrices, Adam for the rest, WSD, AdamC (section 4).

    kind adam = AdamW for all: `adam_lr` everywhere, `matrix_weight_decay` on the same matrices. Fine-tunes of models that were trained with
    AdamW use it.
    """

    kind: Literal["normuon", "adam"] = Field(
        default="normuon", description="optimizer: normuon (Adam for what is no matrix) or adam for everything"
    )
    matrix_lr: float = Field(default=1e-2, gt=0, le=1e38, description="peak learning rate of matrices")
    matrix_weight_decay: float = Field(default=0.01, ge=0, le=1e3, description="weight decay of matrices")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="momentum of the matrices' gradients")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay rate of the second moments of matrix rows")
    matrix_scale: Literal["spectral", "match_rms", "exact_rms"] = Field(
        default="spectral",
        description="scale of NorMuon's update; exact_rms: root mean square 0.2 whatever its rank (as published)",
    )
    matrix_polar: Literal["polar-express", "quintic"] = Field(
        default="polar-express", description="polynomial of NorMuon's orthogonalisation; quintic: Muon's Newton-Schulz (as published)"
    )
    adam_lr: float = Field(default=5e-4, gt=0, le=1e38, description="peak learning rate of Adam's parameters")
    adam_betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="Adam's two decay rates")
    adam_eps: float = Field(default=1e-8, ge=1e-30, le=1, description="epsilon of Adam")
    warmup_steps: int = Field(default=200, ge=0, le=MOST_STEPS, description="number of warm-up steps; at most a third of the run is used")
    cooldown: float = Field(default=0.25, ge=0, le=1, description="final fraction of training in which the learning rate falls to zero")
    cooldown_shape: Literal["linear", "1-sqrt"] = Field(default="linear", description="shape of that fall")
    z_loss: float = Field(default=1e-5, ge=0, le=1e3, description="coefficient of the z-loss during the cooldown")
    clip_norm: float | None = Field(default=None, gt=0, le=1e9, description="maximum norm of the gradient; null = no clipping")


class EvaluationConfig(Strict):
    every: int = Field(
        default=250,
        gt=0,
        le=MOST_STEPS,
        description="steps between evaluations; the best checkpoint is chosen among steps that are both evaluated and saved",
    )
    at_start: bool = Field(default=False, description="also evaluate before the first step (logged as step -1): where a fine-tune starts")
    rows: int = Field(default=64, ge=0, le=2**20, description="number of held-out sequences; 0 = no validation")
    feedback_passes: list[FeedbackPasses] = Field(
        default=[0, 1, 2], min_length=1, description="feedback passes to evaluate with: numbers, exact, converged"
    )
    batch_rows: int = Field(default=16, gt=0, le=2**20, description="held-out sequences in a forward pass")


class TrainConfig(Strict):
    steps: int = Field(gt=0, le=MOST_STEPS, description="number of optimizer steps")
    batch_rows: int = Field(default=32, gt=0, le=2**20, description="sequences in an optimizer step, over all microbatches and processes")
    microbatch_rows: int | None = Field(default=None, gt=0, le=2**20, description="sequences in a forward pass; default: batch_rows")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="precision of activations and matrix products")
    device: str = Field(default="auto", description="device to train on: auto, cpu, cuda, cuda:1, mps")
    compile: bool = Field(default=False, description="compile the trunk with torch.compile")
    activation_checkpointing: bool = Field(default=False, description="recompute activations in the backward pass: less memory, more time")
    checkpoint_every: int = Field(default=500, gt=0, le=MOST_STEPS, description="steps between checkpoints")
    keep_checkpoints: int = Field(default=2, gt=0, le=MOST_STEPS, description="number of newest checkpoints to keep")
    log_every: int = Field(default=10, gt=0, le=MOST_STEPS, description="steps between lines of metrics.jsonl")
    tracker: Literal["none", "tensorboard", "wandb"] = Field(default="none", description="where to log metrics besides metrics.jsonl")
    initial_checkpoint: Place | None = Field(default=None, description="model folder to start from, of the same shape")

    @model_validator(mode="after")
    def _microbatches_fit(self) -> TrainConfig:
        if self.microbatch_rows and self.batch_rows % self.microbatch_rows:
            raise ValueError(f"batch_rows ({self.batch_rows}) must be a multiple of microbatch_rows ({self.microbatch_rows})")
        return self


class ParallelConfig(Strict):
    """Processes that share a run: `shard` x `replicate` of them, started by torchrun or SLURM."""

    shard: int = Field(gt=0, le=2**16, description="processes that weights, gradients and optimizer state are cut over")
    replicate: int = Field(default=1, gt=0, le=2**16, description="groups of such processes, each with a whole copy (HSDP)")
    reshard: bool = Field(
        default=True, description="free a layer's weights after each pass and gather them again; false: less communication, more memory"
    )
    timeout: float = Field(default=600.0, gt=0, le=86400, description="seconds that ranks wait for one that hangs before the run ends")


class Recipe(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200, description="name of the run and of its folder")
    seed: int = Field(default=0, ge=0, lt=2**63, description="random seed of weights, data order, passes and noise")
    description: str = Field(default="", description="description for readers")
    output: Place | None = Field(default=None, description="folder of the run; default: runs/NAME")
    model: ModelConfig = Field(description="the model to train")
    data: DataConfig = Field(default_factory=DataConfig, description="data to train on")
    feedback: FeedbackConfig = Field(default_factory=FeedbackConfig, description="schedule and noise of feedback in training")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizer and learning rates")
    train: TrainConfig = Field(description="length of training, batches, device and checkpoints")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="evaluation on held-out data during training")
    parallel: ParallelConfig | None = Field(
        default=None, description="how a run is cut over processes; default: over all that torchrun started"
    )

    @model_validator(mode="before")
    @classmethod
    def _older_keys(cls, raw: Any) -> Any:
        return moved_fusion(raw)

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return Path(self.output or Path("runs") / self.name)

    @property
    def origin(self) -> str | None:
        """The folder or hub id that brings the model's shape; None if the recipe says it."""
        return None if self.model.preset or self.model.trunk else self.train.initial_checkpoint or self.model.source

    @property
    def compiled_feedback(self) -> FeedbackConfig:
        """`feedback`, its later passes starting at few places where blocks are compiled."""
        return self.feedback.compiled(self.data.length) if self.train.compile else self.feedback

    @property
    def connection(self) -> ConnectionConfig:
        """The connection of a model that is made from this recipe, its fusion named."""
        return self.feedback.connection.named("residual" if self.model.source else "gated")


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a yaml recipe and apply `a.b=c` overrides. `path` is a file, a run folder, whose recipe runs there, or a shipped recipe's name.

    Raises ValueError, in one line that names the file and the key, for anything wrong with it.
    """
    named, path = Path(os.path.expanduser(path)), find_recipe(path)
    raw = read_mapping(path, "a recipe")
    if named.is_dir():  # it may have been moved since, or be named from another folder
        raw["output"] = str(named)
    for override in overrides:
        apply_override(raw, override)
    return parse(Recipe, moved_fusion(raw), str(path))


def set_key(raw: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set the dotted `key` of a recipe that has not been parsed. Raises ValueError, naming `where`, if it leads through a value."""
    node = raw
    *parents, leaf = key.split(".")
    for name in parents:
        if not isinstance(node.setdefault(name, {}), dict):
            raise ValueError(f"{where}: {name} is a value, not a section")
        node = node[name]
    node[leaf] = value


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set what `--set KEY=VALUE` says in a recipe that has not been parsed. Raises ValueError for what is no such text."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {override}: expected key.path=value")
    try:
        read = read_yaml(value)
    except ValueError as error:
        raise ValueError(f"--set {shorten(override, 60)}: the value is not yaml ({error})") from None
    set_key(raw, key, read, f"--set {override}")
