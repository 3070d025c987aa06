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

# In the first parameter group of a saved optimizer; in a live one between loading and the next forward only. After it stands where among
# the optimizer's parameters the model's begin, unless that is the first: one optimizer may hold several models, each at a step of its own.
COUNT = "fullband_step"


class StepCounter(nn.Module):
    """Counts the steps of the optimizers that hold any of the model's parameters; several that step after one forward are one step."""

    step: Tensor
    _model: Any = None  # weak reference to the model
    # Optimizers that hold its parameters, with the name of its count in their states; None before the first forward
    _known: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] | None = None
    _strangers = False  # whether an optimizer that holds none has stepped since
    _warned = False  # whether the schedule's end was told
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
        self._warn_beyond(model)
        self.accumulation += 1
        return int(self.step), self.accumulation

    def _begin(self, model: nn.Module) -> None:
        """The first training forward of this model here: from now on steps are counted, from where a resumed optimizer was."""
        self._model, self._known = weakref.ref(model), weakref.WeakKeyDictionary()
        _watch_optimizers()
        _COUNTING.add(self)
        self._find_optimizers(model)

    def _warn_beyond(self, model: nn.Module) -> None:
        steps = getattr(getattr(model, "config", None), "training_steps", None)
        over = steps is not None and int(self.step) >= steps
        warned, self._warned = self._warned, over
        if over and not warned:
            warnings.warn(
                f"the model has been trained for {int(self.step)} steps and config.training_steps is {steps}: the schedule of passes stays "
                "at its end. For a new run: model.progress.step.zero_()",
                stacklevel=2,
            )

    def _find_optimizers(self, model: nn.Module) -> None:
        for found in gc.get_objects():  # once a run: nobody tells a model its optimizer
            # accelerate's wrapper is one by type, but what it has is the wrapped one's
            if (
                issubclass(type(found), torch.optim.Optimizer)
                and "param_groups" in vars(found)
                and (place := _place(found, model)) is not None
            ):
                self._know(found, place)

    def _know(self, optimizer: torch.optim.Optimizer, place: int) -> None:
        assert self._known is not None
        if optimizer in self._known:
            return
        self._known[optimizer] = name = f"{COUNT}_{place}" if place else COUNT
        progress = weakref.ref(self)

        def save_count(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            if (owner := progress()) is not None:
                state["param_groups"][0].setdefault(name, int(owner.step))  # one that was loaded and not yet taken over stays

        optimizer.register_state_dict_post_hook(save_count)

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the count that was loaded into `optimizer`, if one was: that step begins, whatever was broken off before."""
        assert self._known is not None
        count = optimizer.param_groups[0].pop(self._known[optimizer], None)
        if count is not None and self._counts:
            self.step.fill_(count)
            self.accumulation = -1

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of any optimizer."""
        model = self._model() if self._model is not None else None
        if model is None or self._known is None:
            return
        began, before = self.accumulation >= 0, int(self.step)
        if optimizer not in self._known:
            place = _place(optimizer, model)
            if place is None:
                self._strangers = self._strangers or began
                return
            self._know(optimizer, place)
            self._resume(optimizer)
            if int(self.step) != before:
                warnings.warn(
                    f"the optimizer was resumed at step {int(self.step)}, and the step just done took the passes of step {before}: load it "
                    "before the model's first forward",
                    stacklevel=2,
                )
        if began and self._counts:
            self.step += 1
            self.accumulation = -1

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """A model that goes back to a checkpoint is at the beginning of its step."""
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if f"{prefix}step" in state_dict:
            self.accumulation = -1

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__()}
        for own in ("_model", "_known", "_strangers", "_warned"):  # a copy has parameters, and so optimizers, of its own
            state.pop(own, None)
        return state


_COUNTING: weakref.WeakSet[StepCounter] = weakref.WeakSet()


def _place(optimizer: torch.optim.Optimizer, model: nn.Module) -> int | None:
    """The place of the model's first parameter among the optimizer's; None if it holds none."""
    own = {id(parameter) for parameter in model.parameters()}
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((place for place, parameter in enumerate(held) if id(parameter) in own), None)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for progress in list(_COUNTING):
        progress.count(optimizer)
