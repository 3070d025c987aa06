"""The step that somebody else's trainer is at: passes, prefixes and jitter are functions of it (law 7), and no trainer hands it over.

Steps are counted by a hook that torch calls after every optimizer's step. The count is saved twice: with the model's weights, and in
the state of the optimizer, which whoever can resume a run saves. So a run of adapters, whose checkpoints leave out the model's own
tensors, goes on where it was too.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

COUNT = "fullband_step"  # in the first parameter group of a saved optimizer; in a live one between loading and the next forward only


class TrainingProgress(nn.Module):
    """Counts the steps of the optimizers that hold any of the model's parameters; several that step after one forward are one step."""

    step: Tensor
    _model: Any = None  # weak reference to the model
    _known: weakref.WeakSet[torch.optim.Optimizer] | None = None  # optimizers that hold its parameters; None before the first forward
    _strangers = False  # whether an optimizer that holds none has stepped since
    _counts = True  # whether the hook does; else the caller says the step

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.accumulation = -1  # which training forward of the step was the last

    def at(self, step: int) -> None:
        """Say the step, before its first forward: for trainers whose optimizer holds copies of the parameters. Nothing is counted from then
        on. Raises ValueError for a negative step."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        self.step.fill_(step)
        self.accumulation = -1
        self._counts = False

    def next_call(self, model: nn.Module) -> tuple[int, int]:
        """(step, accumulation index) of the training forward that begins.

        Raises ValueError if nothing is trainable, and if steps cannot be counted: the optimizer that steps holds none of the parameters.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("no parameter of the model is trainable")
        if self._known is None:
            self._begin(model)
        assert self._known is not None
        for optimizer in list(self._known):
            self._resume(optimizer)
        if self._strangers and self._counts and not self._known:
            self._strangers = False
            self._find_optimizers(model)
            if not self._known:
                raise ValueError(
                    "an optimizer has stepped that holds none of the model's parameters (shards or copies of them?), so the schedule of "
                    f"passes would stay at step {int(self.step)}: call model.progress.at(step) before each step, in a trainer's callback"
                )
        self.accumulation += 1
        return int(self.step), self.accumulation

    def _begin(self, model: nn.Module) -> None:
        """The first training forward of this model here: from now on steps are counted, from where a resumed optimizer was."""
        self._model, self._known = weakref.ref(model), weakref.WeakSet()
        _watch_optimizers()
        _COUNTING.add(self)
        self._find_optimizers(model)
        for optimizer in list(self._known):
            self._resume(optimizer)
        steps = getattr(getattr(model, "config", None), "training_steps", None)
        if steps is not None and int(self.step) >= steps:
            warnings.warn(
                f"the model has been trained for {int(self.step)} steps and config.training_steps is {steps}: the schedule of passes stays "
                "at its end. For a new run: model.progress.step.zero_()",
                stacklevel=2,
            )

    def _find_optimizers(self, model: nn.Module) -> None:
        for found in gc.get_objects():  # once a run: nobody tells a model its optimizer
            # accelerate's wrapper is one by type, but what it has is the wrapped one's
            if issubclass(type(found), torch.optim.Optimizer) and "param_groups" in vars(found) and _holds(found, model):
                self._know(found)

    def _know(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._known is not None
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        progress = weakref.ref(self)

        def save_count(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            if (owner := progress()) is not None:
                state["param_groups"][0][COUNT] = int(owner.step)

        optimizer.register_state_dict_post_hook(save_count)

    def _resume(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take over the count that was loaded into `optimizer`, if one was; whether it is another."""
        count = optimizer.param_groups[0].pop(COUNT, None)
        if count is None or not self._counts or count == int(self.step):
            return False
        self.step.fill_(count)
        return True

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of any optimizer."""
        model = self._model() if self._model is not None else None
        if model is None or self._known is None:
            return
        if optimizer not in self._known:
            if not _holds(optimizer, model):
                self._strangers = self._strangers or self.accumulation >= 0
                return
            self._know(optimizer)
            before = int(self.step)
            if self._resume(optimizer):
                warnings.warn(
                    f"the optimizer was resumed at step {int(self.step)}, and the step just done took the passes of step {before}: load it "
                    "before the model's first forward",
                    stacklevel=2,
                )
        if self.accumulation >= 0 and self._counts:
            self.step += 1
            self.accumulation = -1

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__()}
        for own in ("_model", "_known", "_strangers"):  # a copy has parameters, and so optimizers, of its own
            state.pop(own, None)
        return state


_COUNTING: weakref.WeakSet[TrainingProgress] = weakref.WeakSet()


def _holds(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    parameters = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for progress in list(_COUNTING):
        progress.count(optimizer)
