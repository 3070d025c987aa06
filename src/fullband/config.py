"""The recipe: everything a run is, typed and strict. An unknown key is an error that names the nearest known one."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal, Union

from pydantic import Field, field_validator, model_validator

from fullband.shipped import find_recipe
from fullband.strict import Place, Places, Strict, parse, read_yaml

MOST_STEPS, MOST_PASSES, MOST_TRAINED = 10**9, 10**5, 256  # above which a number is a slip, not a plan
Beta = Annotated[float, Field(ge=0, lt=1)]
FusionName = Literal["gated", "concat", "add", "residual"]
FedBackName = Literal["top", "middle", "first", "mix"]
Control = Literal["none", "zeroed", "shuffled", "constant-gate"]
FeedbackPasses = Union[Annotated[int, Field(ge=0, le=MOST_PASSES)], Literal["exact", "converged"]]  # 0 = plain reading


class Yarn(Strict):
    """YaRN (arXiv:2309.00071): rotary positions for a context `factor` times the `original` one, in tokens.

    Frequencies that turn more than `beta_fast` times within the original context stay, those that turn less than `beta_slow` times are
    divided by the factor, those between are mixed; attention scores are multiplied by (1 + 0.1 ln factor)².
    """

    type: Literal["yarn"] = Field(default="yarn", description="the kind of extension")
    factor: float = Field(gt=1, le=1e6, description="how many times longer the context becomes")
    original: int = Field(gt=1, le=2**31, description="the context the model was trained at")
    beta_fast: float = Field(default=32.0, ge=1e-6, le=1e6, description="turns within the original context above which a frequency stays")
    beta_slow: float = Field(default=1.0, ge=1e-6, le=1e6, description="turns below which a frequency is divided by the factor")

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

    vocab_size: int = Field(gt=1, le=2**24, description="tokens of the vocabulary; the tokenizer's when a recipe leaves it out")
    width: int = Field(gt=0, le=2**17, description="numbers in a state")
    layers: int = Field(gt=0, le=4096, description="decoder layers")
    heads: int = Field(gt=0, le=2**14, description="query heads")
    kv_heads: int = Field(gt=0, le=2**14, description="key and value heads; divides heads")
    glu_width: int = Field(gt=0, le=2**20, description="width inside the feed-forward layer")
    context: int = Field(gt=1, le=2**31, description="longest sequence, in tokens")
    window: int = Field(gt=0, le=2**31, description="keys a sliding-window layer sees, its own included")
    full_every: int = Field(default=6, gt=0, le=2**31, description="layers 6, 12, ... counted from 1 attend fully")
    head_dim: int | None = Field(default=None, gt=0, le=2**14, description="numbers in a head; default: width / heads")
    rope_base: float = Field(default=10_000.0, ge=1.001, le=1e15, description="base of the rotary frequencies")
    rope: Yarn | None = Field(default=None, description="how rotary positions reach beyond the context of pre-training")
    norm_eps: float = Field(default=1e-6, gt=0, le=1, description="added under the root of the norms")
    fed_back: FedBackName = Field(default="top", description="which state is carried: the top one, an ablation's otherwise (section 5)")

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

    @property
    def state_width(self) -> int:
        """Numbers in the state of a position: the top state, and behind it the one that is fed back if that is another."""
        return self.width if self.fed_back == "top" else 2 * self.width

    def layer_is_full(self, layer: int) -> bool:
        """Whether layer `layer` (counted from 0) attends fully."""
        return (layer + 1) % self.full_every == 0


class ModelConfig(Strict):
    """A full-bandwidth model: a preset (see `presets.py`) and its overrides, or a `source`; and the fusion (Eq. 4).

    `rope_base`, `rope` and `context` extend the context of either (long-context extension, section 4.2).
    """

    preset: str | None = Field(default=None, description="a named shape; `fullband info` describes them")
    trunk: dict[str, Any] | TrunkConfig = Field(default_factory=dict, description="overrides of the preset, or the whole shape")
    source: Place | None = Field(
        default=None, description="a Hugging Face causal LM (folder or hub id) to convert, or a saved model or run"
    )
    fusion: FusionName | None = Field(default=None, description="default: gated; residual where a source is converted; a saved model's own")
    rope_base: float | None = Field(
        default=None, ge=1.001, le=1e15, description="another base of the rotary frequencies, for a longer context"
    )
    rope: Yarn | None = None
    context: int | None = Field(default=None, gt=1, le=2**31, description="default: the model's own, or rope's factor x original")

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if self.source is not None and (self.preset or self.trunk):
            raise ValueError("source: brings its own shape; leave out preset and trunk")
        return self

    @property
    def fusion_name(self) -> FusionName:
        """The fusion of a model that is made from this recipe."""
        return self.fusion or ("residual" if self.source else "gated")


class Phase(Strict):
    """For `fraction` of training, draw the number of passes with these probabilities: {1: 0.75, 2: 0.25}."""

    fraction: float = Field(gt=0, le=1, description="share of training; those of all phases sum to 1")
    passes: dict[int, float] = Field(description="number of passes: its probability; they sum to 1")

    @model_validator(mode="after")
    def _is_distribution(self) -> Phase:
        for k, probability in self.passes.items():
            if k < 1:
                raise ValueError(f"passes: {k} is not a number of passes; the plain pass alone is 1")
            if k > MOST_TRAINED:
                raise ValueError(f"passes: a step trains at most {MOST_TRAINED} passes, got {k}")
            if probability < 0:
                raise ValueError(f"passes: the probability of {k} passes is negative ({probability})")
        if abs(sum(self.passes.values()) - 1) > 1e-6:
            raise ValueError(f"passes: probabilities sum to {sum(self.passes.values()):g}, not 1")
        return self


class AdaptiveConfig(Strict):
    """Raise the share of deeper passes while the states do not settle (the paper's limitation 2)."""

    every: int = Field(default=100, gt=0, le=MOST_STEPS, description="steps between measurements")
    passes: int = Field(default=12, ge=8, le=16, description="no-grad passes of one measurement")
    rows: int = Field(default=8, gt=0, le=2**20, description="rows measured")
    tolerance: float = Field(default=1e-2, gt=0, le=10, description="relative state change that counts as settled")
    ratio: float = Field(default=0.9, gt=0, le=10, description="median and p99 change ratio above which deeper passes are raised")
    growth: float = Field(default=2.0, gt=1, le=1e3, description="factor on the share of the deeper passes, up and (its root) down")
    floor: float = Field(
        default=0.03, gt=0, le=1, description="smallest share of the deeper passes, of all batches of the run; at most the ceiling"
    )
    ceiling: float = Field(default=0.5, gt=0, le=1, description="largest share of the deeper passes, of the batches that feed back")

    @model_validator(mode="after")
    def _floor_is_below(self) -> AdaptiveConfig:
        if self.floor > self.ceiling:
            raise ValueError(f"floor ({self.floor}) must not be above ceiling ({self.ceiling})")
        return self


class FeedbackConfig(Strict):
    """Multi-pass training (Eqs. 9-13)."""

    schedule: str | list[Phase] = Field(default="none", description="a named schedule of passes, none, or a list of phases")
    start_step: int = Field(default=0, ge=0, le=MOST_STEPS, description="no feedback before this step")
    loss_weight: float = Field(default=1.0, ge=0, le=1e6, description="lambda of Eq. 12")
    loss_weight_ramp: int = Field(default=0, ge=0, le=MOST_STEPS, description="steps after switch-on over which lambda rises from 0")
    jitter: float = Field(default=0.02, ge=0, le=100, description="sigma of Eq. 13")
    prefix: Literal["uniform", "shared", "per-row", "answer", "off"] = Field(
        default="uniform",
        description="plain positions of later passes, drawn for each pass; shared = one for all passes; answer = the prompts of chat data",
    )
    prefix_rounding: int | None = Field(
        default=None,
        gt=0,
        le=2**24,
        description="later passes are computed from a multiple of this position on, which changes no value and no prefix; default: 1, or "
        "when compiled an eighth of the row (64 in short rows), because every start is a shape to compile",
    )
    fusion_warmup: int = Field(default=0, ge=0, le=MOST_STEPS, description="steps after switch-on that train only the fusion")
    control: Control = Field(default="none", description="ablation: what the fusion gets instead of the carried state")
    reuse: bool = Field(default=True, description="exact prefix reuse; off = the naive K full passes")
    adaptive: AdaptiveConfig | None = Field(default=None, description="settings of the adaptive share of deeper passes; null = off")

    @property
    def rounding(self) -> int:
        """The multiple that later passes start at."""
        return self.prefix_rounding or 1

    def compiled(self, length: int) -> FeedbackConfig:
        """The same for compiled blocks and rows of `length`: unless it is set, later passes start at few places, each a compilation."""
        if self.prefix_rounding is not None:
            return self
        return self.model_copy(update={"prefix_rounding": max(min(64, length // 2), length // 8)})

    @field_validator("prefix", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # yaml reads a bare `off` as false


class OptimConfig(Strict):
    """NorMuon for matrices, Adam for the rest, WSD, AdamC (section 4).

    kind adam = AdamW for all: `adam_lr` everywhere, `matrix_weight_decay` on the same matrices. Fine-tunes of models that were trained with
    AdamW use it.
    """

    kind: Literal["normuon", "adam"] = Field(default="normuon", description="normuon (matrices; Adam for the rest) or adam for all")
    matrix_lr: float = Field(default=1e-2, gt=0, description="peak learning rate of matrices")
    matrix_weight_decay: float = Field(default=0.01, ge=0, le=1e3, description="weight decay of matrices")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="of the matrices' gradients")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="of the second moments of matrices' rows")
    matrix_scale: Literal["spectral", "match_rms", "exact_rms"] = Field(
        default="spectral",
        description="size of NorMuon's update; exact_rms = 0.2 at every entry on average, whatever its rank (as published)",
    )
    matrix_polar: Literal["polar-express", "quintic"] = Field(
        default="polar-express", description="polynomial of NorMuon's orthogonalisation; quintic = Muon's Newton-Schulz (as published)"
    )
    adam_lr: float = Field(default=5e-4, gt=0, description="peak learning rate of what Adam trains")
    adam_betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="Adam's two decay rates")
    adam_eps: float = Field(default=1e-8, gt=0, le=1, description="added to Adam's denominator")
    warmup_steps: int = Field(default=200, ge=0, le=MOST_STEPS, description="steps of rising learning rates; at most a third of the run")
    cooldown: float = Field(default=0.25, ge=0, le=1, description="last fraction of training that decays to zero")
    cooldown_shape: Literal["linear", "1-sqrt"] = Field(default="linear", description="how the learning rate falls")
    z_loss: float = Field(default=1e-5, ge=0, le=1e3, description="coefficient during the cooldown")
    clip_norm: float | None = Field(default=None, gt=0, le=1e9, description="largest norm of the gradient; null = not clipped")


class TaskSource(Strict):
    """Built-in tasks with an answer at every position: running products in a group, or running arithmetic modulo n."""

    kind: Literal["task"] = Field(default="task", description="a built-in task")
    task: Literal["group-word", "modular"] = Field(default="group-word", description="running products in a group, or running arithmetic")
    group: str = Field(default="S3", description="S3, S4, S5, A4, A5 or Z_n such as Z7")
    modulus: int = Field(default=7, gt=1, le=1000, description="of the arithmetic")

    @field_validator("group")
    @classmethod
    def _group_is_known(cls, group: str) -> str:
        is_cyclic = group[:1] == "Z" and group[1:].isdecimal() and group[1:] == str(int(group[1:])) and 2 <= int(group[1:]) <= 1000
        if group not in ("S3", "S4", "S5", "A4", "A5") and not is_cyclic:
            raise ValueError("no such group; there are S3, S4, S5, A4, A5 and Z2 to Z1000")
        return group


class FilesSource(Strict):
    """Local txt, jsonl or parquet files (txt and jsonl as .gz and .zst too). Globs are allowed."""

    kind: Literal["files"] = Field(default="files", description="local files")
    paths: Places = Field(min_length=1, description="files or globs")
    validation_paths: Places = Field(default_factory=list, description="files or globs that are held out")
    validation_fraction: float = Field(default=0.02, ge=0, lt=1, description="held-out documents where no validation_paths are given")
    text_field: str = Field(default="text", description='a field, or a pattern of several such as "{question} {answer}"')


class HuggingFaceSource(Strict):
    """A dataset of the Hugging Face hub (or a local folder of one), streamed."""

    kind: Literal["huggingface"] = Field(default="huggingface", description="a dataset of the Hugging Face hub")
    dataset: Place = Field(description="its id, or a local folder")
    name: str | None = Field(default=None, description="its configuration")
    split: str = Field(default="train", description="the split to train on")
    validation_split: str | None = Field(default=None, description="the split that is held out")
    validation_documents: int = Field(default=512, gt=0, le=2**31, description="first documents, held out if there is no validation_split")
    text_field: str = Field(default="text", description='a field, or a pattern of several such as "{question} {answer}"')


class PythonStdlibSource(Strict):
    """The running interpreter's own standard library: real text on any machine, nothing downloaded."""

    kind: Literal["python-stdlib"] = Field(default="python-stdlib", description="the interpreter's own standard library")
    validation_fraction: float = Field(default=0.05, ge=0, lt=1, description="share of the documents held out")


class ProgramTextSource(Strict):
    """Generated programs that ask about their own state; they contain the constructions of App. F."""

    kind: Literal["program-text"] = Field(default="program-text", description="generated programs")
    seed: int = Field(default=0, ge=0, lt=2**63, description="another seed makes other programs")
    documents: int = Field(default=200_000, gt=0, le=2**31, description="programs in an epoch")
    updates: int = Field(default=256, gt=0, le=2**20, description="most null updates before a question")
    validation_fraction: float = Field(default=0.01, ge=0, lt=1, description="share of the documents held out")


class ChatSource(Strict):
    """Conversations, from local jsonl or parquet files or a Hugging Face dataset: [{role, content}, …] in `messages_field`, or a prompt and
    its completion in two fields. Each answer becomes one document, the conversation up to it, with the loss on that answer alone."""

    kind: Literal["chat"] = Field(default="chat", description="conversations")
    paths: Places = Field(default_factory=list, description="local files, globs allowed; or name a dataset")
    validation_paths: Places = Field(default_factory=list, description="files or globs that are held out")
    validation_fraction: float = Field(default=0.02, ge=0, lt=1, description="share of the documents held out")
    dataset: Place | None = Field(default=None, description="a Hugging Face dataset instead of paths")
    name: str | None = Field(default=None, description="its configuration")
    split: str = Field(default="train", description="the split to train on")
    validation_split: str | None = Field(default=None, description="the split that is held out")
    validation_documents: int = Field(default=512, gt=0, le=2**31, description="first conversations, held out without a validation_split")
    messages_field: str = Field(default="messages", description="the field that holds a list of messages")
    prompt_field: str | None = Field(default=None, description="the field of the prompt, instead of messages")
    completion_field: str | None = Field(default=None, description="the field of its completion")
    system: str | None = Field(default=None, description="a system message put before conversations that have none")
    template: Place | None = Field(default=None, description="a jinja file; default: the tokenizer's own chat template, else ChatML")

    @model_validator(mode="after")
    def _is_complete(self) -> ChatSource:
        if bool(self.paths) == bool(self.dataset):
            raise ValueError("name either paths or a dataset")
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError("prompt_field and completion_field go together")
        return self


Source = Annotated[
    Union[TaskSource, FilesSource, HuggingFaceSource, PythonStdlibSource, ProgramTextSource, ChatSource], Field(discriminator="kind")
]


class DataConfig(Strict):
    source: Source = Field(default_factory=PythonStdlibSource, description="where documents come from: its kind says which keys it has")
    tokenizer: Place = Field(
        default="auto", description="bytes, program, a tokenizer.json (or its folder), tiktoken:NAME; auto = the source model's, else bytes"
    )
    length: int = Field(default=512, gt=1, le=2**24, description="positions in a training row")
    packing: bool = Field(default=True, description="several documents in a row; false = one, padded: what recurrent layers need")
    shuffle_documents: int = Field(default=1024, gt=0, le=2**31, description="documents of a block, shuffled as a whole; 1 = no shuffling")


class EvaluationConfig(Strict):
    every: int = Field(
        default=250, gt=0, le=MOST_STEPS, description="steps; the best checkpoint is one that was evaluated and saved at once"
    )
    at_start: bool = Field(default=False, description="before the first step too (logged as step -1): what a fine-tune starts from")
    rows: int = Field(default=64, ge=0, le=2**20, description="held-out rows; 0 = no validation")
    feedback_passes: list[FeedbackPasses] = Field(
        default=[0, 1, 2], min_length=1, description="ways of evaluating: numbers of feedback passes, exact, converged"
    )
    batch_rows: int = Field(default=16, gt=0, le=2**20, description="held-out rows in a forward pass")


class TrainConfig(Strict):
    steps: int = Field(gt=0, le=MOST_STEPS, description="optimizer steps")
    batch_rows: int = Field(default=32, gt=0, le=2**20, description="rows in a step, over all microbatches")
    microbatch_rows: int | None = Field(default=None, gt=0, le=2**20, description="rows in a forward pass; default: batch_rows")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="of activations and matrix products")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps")
    compile: bool = Field(default=False, description="torch.compile the trunk")
    activation_checkpointing: bool = Field(
        default=False, description="compute activations again in the backward pass: less memory, more time"
    )
    checkpoint_every: int = Field(default=500, gt=0, le=MOST_STEPS, description="steps between checkpoints")
    keep_checkpoints: int = Field(default=2, gt=0, le=MOST_STEPS, description="newest checkpoints that are kept")
    log_every: int = Field(default=10, gt=0, le=MOST_STEPS, description="steps between lines of metrics.jsonl")
    tracker: Literal["none", "tensorboard", "wandb"] = Field(default="none", description="where metrics go besides metrics.jsonl")
    initial_checkpoint: Place | None = Field(default=None, description="a model folder to start from")

    @model_validator(mode="after")
    def _microbatches_fit(self) -> TrainConfig:
        if self.microbatch_rows and self.batch_rows % self.microbatch_rows:
            raise ValueError(f"batch_rows ({self.batch_rows}) must be a multiple of microbatch_rows ({self.microbatch_rows})")
        return self


class Recipe(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200, description="of the run and of its folder")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of weights, data order, passes and noise")
    description: str = Field(default="", description="a sentence for people")
    output: Place | None = Field(default=None, description="run folder; default runs/NAME")
    model: ModelConfig = Field(description="the model to train")
    data: DataConfig = Field(default_factory=DataConfig, description="what it is trained on")
    feedback: FeedbackConfig = Field(default_factory=FeedbackConfig, description="passes, schedule and noise of training")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizer and learning rates")
    train: TrainConfig = Field(description="length of training, batches and the machine")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="held-out loss while training")


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a yaml recipe and apply `a.b=c` overrides. `path` is a file, a run folder, whose recipe runs there, or a shipped recipe's name.

    Raises ValueError, in one line that names the file and the key, for anything wrong with it.
    """
    named, path = Path(os.path.expanduser(path)), find_recipe(path)
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: not readable as yaml: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: a recipe is a mapping of keys; this file holds {'nothing' if raw is None else type(raw).__name__}")
    if named.is_dir():  # it may have been moved since, or be named from another folder
        raw["output"] = str(named)
    for override in overrides:
        _apply_override(raw, override)
    return parse(Recipe, raw, str(path))


def set_key(raw: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set the dotted `key` of a recipe that has not been parsed. Raises ValueError, naming `where`, if it leads through a value."""
    node = raw
    *parents, leaf = key.split(".")
    for name in parents:
        if not isinstance(node.setdefault(name, {}), dict):
            raise ValueError(f"{where}: {name} holds a value, not a section")
        node = node[name]
    node[leaf] = value


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {override}: expected key.path=value")
    try:
        read = read_yaml(value)
    except ValueError as error:
        raise ValueError(f"--set {shorten(override, 60)}: the value is not yaml ({error})") from None
    set_key(raw, key, read, f"--set {override}")
