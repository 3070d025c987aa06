"""What a run is made of, from a recipe: from scratch, from a model folder, or from where it stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from fullband.config import Recipe
from fullband.data.batch import Batch
from fullband.data.loader import Loader
from fullband.feedback.connection import current_name
from fullband.feedback.schedule import PassSchedule
from fullband.files import TRAINING, read_tensors, write_bytes
from fullband.loading import LoadedModel
from fullband.model import FullBandModel
from fullband.optim.optimizer import Optimizer
from fullband.optim.sharded import local
from fullband.optim.wsd import warmup_length, warmup_words
from fullband.training.checkpoint import OPTIMIZER, Checkpoints, checkpoint_name
from fullband.training.milestones import Milestones
from fullband.training.models import current_model_identity, difference, model_identity
from fullband.training.parallel import ALONE, Parallel
from fullband.training.resolve import resolve

RECIPE = "recipe.yaml"


class DivergedError(ValueError):
    """The loss or the gradients are not finite; the last good state has been saved."""


@dataclass
class Run:
    """Everything the loop changes, and `step`, the number of steps done."""

    recipe: Recipe
    folder: Path
    device: torch.device
    model: LoadedModel
    loader: Loader
    schedule: PassSchedule
    optimizer: Optimizer
    checkpoints: Checkpoints
    milestones: Milestones
    notices: list[str] = field(default_factory=list)  # what differs from what the recipe might lead one to expect
    parallel: Parallel = ALONE
    held_out: list[Batch] = field(default_factory=list)  # for validation; empty = none
    best: dict[str, Any] | None = None  # {"checkpoint": name, "validation_loss": nats} of the best one so far
    unlogged: dict[str, Any] | None = None  # what a full disk kept from being logged of the step that the run resumes from
    pending: bool = False  # whether the validation of the step that the run resumes from is still to come
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
            "model": model_identity(self.model, self.recipe),
        }

    def is_finite(self) -> bool:
        """Whether every number of model and optimizer is one."""
        return self._finite((*self.model.parameters(), *self.optimizer.state_dict().values()))

    def _finite(self, tensors: Iterable[Tensor]) -> bool:
        return self.parallel.all(all(bool(local(t).isfinite().all()) for t in tensors))

    def validated(self, loss: float | None) -> None:
        """The checkpoint of this step, saved already, has this validation loss (None: no finite one); it may be the best one so far."""
        if loss is not None and (self.best is None or loss < self.best["validation_loss"]):
            self.best = {"checkpoint": checkpoint_name(self.step), "validation_loss": loss}
        self.save()

    def save(self, pending: bool = False, unlogged: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint, whose validation is still to come if it is `pending`, and what is `unlogged` of it. See `Checkpoints.save`.

        Raises DivergedError where parameters that are not finite would take the place of good ones.
        """
        good = self.checkpoints.last()
        if good and not self._finite(self.model.parameters()):
            left = "the update before it left parameters that are not finite"
            raise DivergedError(f"step {self.step}: {left}; the last good state is {good}")
        training = {
            "step": self.step,
            "tokens": self.tokens,
            "token_equivalent": self.token_equivalent,
            "executed_positions": self.executed_positions,
            "identity": self.identity,
            "loader": self.loader.state_dict(),
            "schedule": self.schedule.state_dict(),
            "milestones": self.milestones.state_dict(),
        }
        keep, parallel = self.recipe.train.keep_checkpoints, self.parallel
        weights, optimizer = parallel.weights(self.model), parallel.whole(self.optimizer.state_dict())
        saved = (self.step, self.model, self.loader, optimizer, training, self.best, keep, pending, unlogged, weights)
        return Path(parallel.from_main(lambda: str(self.checkpoints.save(*saved))))

    @contextmanager
    def kept(self, pending: bool = False, unlogged: dict[str, Any] | None = None) -> Iterator[None]:
        """What fails inside loses nothing that was trained: the state before it is saved, and a ValueError says where.

        pending    whether the step's validation is then still to come
        unlogged   what is still to be logged of the step

        For what changes neither parameters nor optimizer: data, gradients, logging, validation.
        """
        before = self.loader.state_dict(), self.schedule.state_dict()
        try:
            yield
        except Exception as error:
            if not self.step or isinstance(error, DivergedError) or not self.parallel.all_failed():
                raise
            self.loader.load_state_dict(before[0])
            self.schedule.load_state_dict(before[1], self.step)
            checkpoint = self.save(pending, unlogged)
            if isinstance(error, ValueError):
                raise ValueError(f"{error}; training up to step {self.step} is kept in {checkpoint}") from None
            raise

    def restore(self, checkpoint: Path) -> None:
        """Continue from `checkpoint`. Raises ValueError naming what differs if it belongs to another run, or the file that is damaged."""
        training = self.checkpoints.read_training(checkpoint)
        if training["step"] > (steps := self.recipe.train.steps):
            raise ValueError(f"train.steps: the run has done {training['step']} steps ({checkpoint}), the recipe ends after {steps}")
        identity = training["identity"] | {"model": current_model_identity(training["identity"].get("model") or {})}
        for what, before in identity.items():
            if change := difference(what, before, self.identity[what], "there", "in the recipe"):
                raise ValueError(f"{checkpoint}: cannot resume with another {what} ({change})")
        if isinstance(self.model, FullBandModel):  # others were made from the checkpoint
            self.parallel.load_weights(self.model, checkpoint)
        try:
            held = read_tensors(checkpoint / OPTIMIZER)
            self.optimizer.load_state_dict({current_name(name): tensor for name, tensor in held.items()})
        except ValueError as error:
            there = "; was it trained with another optim.kind?" if "optimizer state" in str(error) else ""
            raise ValueError(f"{checkpoint}: cannot resume: {error}{there}") from None
        try:
            self.loader.load_state_dict(training["loader"])
            self.schedule.load_state_dict(training["schedule"], training["step"])
            self.milestones = Milestones.from_state(training["milestones"])
        except (KeyError, IndexError, TypeError, OverflowError) as error:
            raise ValueError(f"{checkpoint / TRAINING}: not the training state of a run ({error!r})") from None
        self.best, self.pending, self.unlogged = self.checkpoints.standing(checkpoint)
        self.step, self.tokens = training["step"], training["tokens"]
        self.token_equivalent, self.executed_positions = training["token_equivalent"], training["executed_positions"]
        if self.parallel.main:
            self.checkpoints.prune(checkpoint, self.best, self.recipe.train.keep_checkpoints)  # a kill may have come before the last save's


def prepare(recipe: Recipe, resume: bool, parallel: Parallel = ALONE) -> Run:
    """Build the run of a recipe.

    Raises ValueError: the run folder holds another run (without `resume`) or nothing to resume (with it), cannot be written, or any
    part of the recipe does not fit.
    """
    folder = recipe.folder
    checkpoints = Checkpoints(folder / "checkpoints")
    last = checkpoints.last()
    if last and not resume:
        raise ValueError(f"{folder}: already holds a run; continue it with --resume, or choose another folder with --set output=...")
    if resume and not last:
        raise ValueError(f"{folder}: no checkpoint to resume from")
    made = resolve(recipe, last)
    nn.Module.to(made.model, made.device)
    parallel.shard(made.model)
    optimizer, schedule = Optimizer(made.model, recipe.optim, recipe.train.steps), made.schedule()
    notices = list(made.notices)
    if warmup_length(recipe.train.steps, recipe.optim.warmup_steps) < recipe.optim.warmup_steps:
        notices.append(warmup_words(recipe.train.steps, recipe.optim.warmup_steps))
    model, loader, device = made.model, made.loader, made.device
    run = Run(recipe, folder, device, model, loader, schedule, optimizer, checkpoints, Milestones(), notices, parallel, made.held_out)
    if last:
        run.restore(last)
        if schedule.switched_on == run.step and run.step:
            run.notices.append(
                f"feedback is switched on at step {run.step}, where the run resumes; the recipe would have switched it on earlier"
            )
    _ = run.identity  # now: at the first save, the files of the data may be gone
    parallel.from_main(lambda: write_recipe(recipe, folder))
    parallel.from_main(checkpoints.make)
    return run


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Keep the resolved recipe with the run. Raises ValueError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / RECIPE, yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).encode())
    except OSError as error:
        raise ValueError(f"{folder}: cannot write the run folder ({error.strerror})") from None
