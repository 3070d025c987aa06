"""What a run is made of, from a recipe: from scratch, from a model folder, or from where it stopped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from fullband.config import FeedbackConfig, Recipe
from fullband.data.loader import Loader, build_loader
from fullband.feedback.schedule import PassSchedule
from fullband.files import read_tensors, write_bytes
from fullband.model import WEIGHTS, FullBandModel
from fullband.optim.optimizer import Optimizer
from fullband.presets import resolve_schedule, resolve_trunk
from fullband.train.checkpoint import OPTIMIZER, Checkpoints, checkpoint_name
from fullband.train.milestones import Milestones

RECIPE = "recipe.yaml"


@dataclass
class Run:
    """Everything the loop changes, and `step`, the number of steps done."""

    recipe: Recipe
    folder: Path
    device: torch.device
    model: FullBandModel
    loader: Loader
    schedule: PassSchedule
    optimizer: Optimizer
    checkpoints: Checkpoints
    milestones: Milestones
    best: dict[str, Any] | None = None  # {"checkpoint": name, "validation_loss": nats} of the best one so far
    step: int = 0
    tokens: int = 0
    token_equivalent: int = 0
    executed_positions: int = 0

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that was stopped; the feedback schedule may change.

        The data's fingerprint reads the files, so it is taken once.
        """
        return {
            "seed": self.recipe.seed,
            "data": self.loader.fingerprint(),
            "batch_rows": self.recipe.train.batch_rows,
            "model": self.model.config.model_dump(),
        }

    def is_finite(self) -> bool:
        """Whether every number of model and optimizer is one."""
        return all(bool(t.isfinite().all()) for t in (*self.model.parameters(), *self.optimizer.state_dict().values()))

    def save(self, validation_loss: float | None = None) -> Path:
        """Write a checkpoint: the best one so far if `validation_loss` is the lowest. See `Checkpoints.save`."""
        if validation_loss is not None and (self.best is None or validation_loss < self.best["validation_loss"]):
            self.best = {"checkpoint": checkpoint_name(self.step), "validation_loss": validation_loss}
        training = {
            "step": self.step,
            "tokens": self.tokens,
            "token_equivalent": self.token_equivalent,
            "executed_positions": self.executed_positions,
            "identity": self.identity,
            "loader": self.loader.state_dict(),
            "schedule": self.schedule.state_dict(),
            "milestones": self.milestones.state_dict(),
            "best": self.best,
        }
        keep = self.recipe.train.keep_checkpoints
        return self.checkpoints.save(self.step, self.model, self.loader.tokenizer, self.optimizer.state_dict(), training, self.best, keep)

    def restore(self, checkpoint: Path) -> None:
        """Continue from `checkpoint`. Raises ValueError naming what differs if it belongs to another run, or the file that is damaged."""
        training = self.checkpoints.read_training(checkpoint)
        for what, before in training["identity"].items():
            if before != self.identity[what]:
                change = _difference(what, before, self.identity[what], "there", "in the recipe")
                raise ValueError(f"{checkpoint}: cannot resume with another {what} ({change})")
        self.model.load_weights(checkpoint / WEIGHTS)
        self.optimizer.load_state_dict(read_tensors(checkpoint / OPTIMIZER))
        self.loader.load_state_dict(training["loader"])
        self.schedule.load_state_dict(training["schedule"])
        self.milestones = Milestones.from_state(training["milestones"])
        self.best, self.step, self.tokens = training["best"], training["step"], training["tokens"]
        self.token_equivalent, self.executed_positions = training["token_equivalent"], training["executed_positions"]
        self.checkpoints.prune(checkpoint, self.best, self.recipe.train.keep_checkpoints)  # a kill may have come before the last save's


def prepare(recipe: Recipe, resume: bool) -> Run:
    """Build the run of a recipe.

    Raises ValueError: the run folder holds another run (without `resume`) or nothing to resume (with it), cannot be written, or any
    part of the recipe does not fit.
    """
    folder = Path(recipe.output or Path("runs") / recipe.name)
    checkpoints = Checkpoints(folder / "checkpoints")
    last = checkpoints.last()
    if last and not resume:
        raise ValueError(f"{folder}: already holds a run; continue it with --resume, or choose another folder with --set output=...")
    if resume and not last:
        raise ValueError(f"{folder}: no checkpoint to resume from")
    device = resolve_device(recipe.train.device)
    loader = build_loader(recipe.data, recipe.seed, recipe.train.batch_rows)
    model = build_model(recipe, loader, fresh=not last).to(device)
    schedule = PassSchedule(compiled_feedback(recipe), resolve_schedule(recipe.feedback.schedule), recipe.train.steps, recipe.seed)
    optimizer = Optimizer(model, recipe.optim, recipe.train.steps)
    run = Run(recipe, folder, device, model, loader, schedule, optimizer, checkpoints, Milestones())
    if last:
        run.restore(last)
    write_recipe(recipe, folder)
    return run


def build_model(recipe: Recipe, loader: Loader, fresh: bool = True) -> FullBandModel:
    """The recipe's model: initialised from its seed, or with the weights of `initial_checkpoint`, which only a `fresh` run reads."""
    trunk = resolve_trunk(recipe.model, loader.vocab_size)
    if loader.vocab_size > trunk.vocab_size:
        raise ValueError(f"model.trunk.vocab_size: {trunk.vocab_size} is smaller than the tokenizer's {loader.vocab_size}")
    if recipe.data.length > trunk.context:
        raise ValueError(f"data.length: rows of {recipe.data.length} do not fit the model's context of {trunk.context}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = FullBandModel(trunk, recipe.model.fusion)
    if recipe.train.initial_checkpoint and fresh:
        start = FullBandModel.load(recipe.train.initial_checkpoint)
        if start.config != model.config:
            change = _difference("model", start.config.model_dump(), model.config.model_dump(), "there", "in the recipe")
            raise ValueError(f"{recipe.train.initial_checkpoint}: not the recipe's model ({change})")
        model.load_state_dict(start.state_dict())
    model.fusion.control = recipe.feedback.control
    model.trunk.activation_checkpointing = recipe.train.activation_checkpointing
    if recipe.train.compile:
        # Few shapes, each compiled for itself: with symbolic ones torch 2.13 generates CPU code that does not compile.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for block in model.trunk.blocks:
            block.compile(dynamic=False)
    return model.train()


def compiled_feedback(recipe: Recipe) -> FeedbackConfig:
    """Where blocks are compiled, prefixes come in multiples of 64, or of an eighth of a long row: a new length is a new compilation."""
    feedback, length = recipe.feedback, recipe.data.length
    if recipe.train.compile and feedback.prefix_rounding == 1:
        return feedback.model_copy(update={"prefix_rounding": max(min(64, length // 2), length // 8)})
    return feedback


def resolve_device(name: str, setting: str = "train.device") -> torch.device:
    """`auto` is CUDA where there is one, else the CPU (MPS on request: untested). Raises ValueError that names the `setting`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{setting}: '{name}' is not available here ({str(error).splitlines()[0]})") from None
    return device


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Keep the resolved recipe with the run. Raises ValueError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / RECIPE, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).encode())
    except OSError as error:
        raise ValueError(f"{folder}: cannot write the run folder ({error.strerror})") from None


def _difference(name: str, before: Any, now: Any, there: str, here: str) -> str:
    """Every value that differs, by its name."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in before | now if before.get(key) != now.get(key)]
        return ", ".join(_difference(str(key), before.get(key), now.get(key), there, here) for key in keys)
    return f"{name}: {before} {there}, {now} {here}"
