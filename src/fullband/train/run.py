"""What a run is made of, from a recipe: from scratch, from a model folder, or from where it stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from fullband.config import Recipe
from fullband.data.loader import Loader, build_loader
from fullband.feedback.schedule import PassSchedule
from fullband.files import write_bytes
from fullband.model import FullBandModel
from fullband.optim.optimizer import Optimizer
from fullband.presets import resolve_schedule, resolve_trunk
from fullband.train.checkpoint import Checkpoints
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
    step: int = 0
    tokens: int = 0
    token_equivalent: int = 0
    executed_positions: int = 0

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that was stopped; the feedback schedule may change."""
        return {
            "seed": self.recipe.seed,
            "data": self.loader.fingerprint(),
            "batch_rows": self.recipe.train.batch_rows,
            "model": self.model.config.model_dump(),
        }

    def save(self, validation_loss: float | None = None) -> Path:
        training = {
            "step": self.step,
            "tokens": self.tokens,
            "token_equivalent": self.token_equivalent,
            "executed_positions": self.executed_positions,
            "identity": self.identity(),
            "loader": self.loader.state_dict(),
            "schedule": self.schedule.state_dict(),
            "milestones": self.milestones.state_dict(),
        }
        keep = self.recipe.train.keep_checkpoints
        return self.checkpoints.save(
            self.step, self.model, self.loader.tokenizer, self.optimizer.state_dict(), training, keep, validation_loss
        )

    def restore(self, checkpoint: Path) -> None:
        """Continue from `checkpoint`. Raises ValueError naming what differs if it belongs to another run."""
        tensors, training = self.checkpoints.load_training(checkpoint, self.model)
        ours = self.identity()
        for what, before in training["identity"].items():
            if before != ours[what]:
                change = f"it was {_short(before)}, now it is {_short(ours[what])}"
                raise ValueError(f"{checkpoint}: cannot resume with another {what} ({change})")
        self.optimizer.load_state_dict(tensors)
        self.loader.load_state_dict(training["loader"])
        self.schedule.load_state_dict(training["schedule"])
        self.milestones = Milestones.from_state(training["milestones"])
        self.step, self.tokens = training["step"], training["tokens"]
        self.token_equivalent, self.executed_positions = training["token_equivalent"], training["executed_positions"]


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
    model = build_model(recipe, loader).to(device)
    schedule = PassSchedule(compiled_feedback(recipe), resolve_schedule(recipe.feedback.schedule), recipe.train.steps, recipe.seed)
    optimizer = Optimizer(model, recipe.optim, recipe.train.steps)
    run = Run(recipe, folder, device, model, loader, schedule, optimizer, checkpoints, Milestones())
    if last:
        run.restore(last)
    write_recipe(recipe, folder)
    return run


def build_model(recipe: Recipe, loader: Loader) -> FullBandModel:
    """The recipe's model: initialised from its seed, or with the weights of `initial_checkpoint`."""
    trunk = resolve_trunk(recipe.model, loader.vocab_size)
    if loader.vocab_size > trunk.vocab_size:
        raise ValueError(f"model.trunk.vocab_size: {trunk.vocab_size} is smaller than the tokenizer's {loader.vocab_size}")
    if recipe.data.length > trunk.context:
        raise ValueError(f"data.length: rows of {recipe.data.length} do not fit the model's context of {trunk.context}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = FullBandModel(trunk, recipe.model.fusion)
    if recipe.train.initial_checkpoint:
        start = FullBandModel.load(recipe.train.initial_checkpoint)
        if start.config != model.config:
            raise ValueError(f"{recipe.train.initial_checkpoint}: its shape is not the recipe's ({_difference(start, model)})")
        model.load_state_dict(start.state_dict())
    model.fusion.control = recipe.feedback.control
    model.trunk.activation_checkpointing = recipe.train.activation_checkpointing
    if recipe.train.compile:
        for block in model.trunk.blocks:
            block.compile()
    return model.train()


def compiled_feedback(recipe: Recipe) -> Any:
    """Prefixes in multiples of 64 when blocks are compiled: a new length is a new compilation."""
    feedback = recipe.feedback
    if recipe.train.compile and feedback.prefix_rounding == 1 and recipe.data.length > 128:
        return feedback.model_copy(update={"prefix_rounding": 64})
    return feedback


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU (MPS on request: untested). Raises ValueError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"train.device: '{name}' is not available here ({str(error).splitlines()[0]})") from None
    return device


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Keep the resolved recipe with the run. Raises ValueError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / RECIPE, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).encode())
    except OSError as error:
        raise ValueError(f"{folder}: cannot write the run folder ({error.strerror})") from None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 120 else text[:117] + "..."


def _difference(a: FullBandModel, b: FullBandModel) -> str:
    left, right = a.config.model_dump(), b.config.model_dump()
    flat = [(k, left["trunk"][k], right["trunk"][k]) for k in left["trunk"]] + [("fusion", left["fusion"], right["fusion"])]
    return ", ".join(f"{k}: {x} there, {y} here" for k, x, y in flat if x != y)
