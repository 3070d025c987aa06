"""Both optimizers behind one schedule: learning rates, z-loss coefficient and a state that is readable by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from fullband.config import OptimConfig
from fullband.optim.adam import adam
from fullband.optim.groups import MATRICES, OptimizerName, ParameterGroup, parameter_groups
from fullband.optim.normuon import NorMuon
from fullband.optim.sharded import gradient_norm, put
from fullband.optim.wsd import in_cooldown, wsd_factor


class Optimizer:
    """NorMuon for the matrices and Adam for the rest of `model`, or AdamW for all, over a run of `steps` steps (section 4).

    Nothing here counts steps: the caller says which one it is, so a resumed run needs only `load_state_dict`. Build it after the model is
    on its device. Raises ValueError for a parameter in no group or two, or a run without steps.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, steps: int) -> None:
        self.config = config
        self.steps = steps
        self.groups = parameter_groups(model, config.kind)
        self.factor(0)  # an impossible schedule fails here, not at the first step
        self.optimizers: dict[OptimizerName, torch.optim.Optimizer] = {}
        normuon, adam_groups = ([g for g in self.groups if g.optimizer == name] for name in ("normuon", "adam"))
        if normuon:
            self.optimizers["normuon"] = NorMuon(
                _parameters(normuon),
                lr=config.matrix_lr,
                weight_decay=config.matrix_weight_decay,
                momentum=config.momentum,
                beta2=config.beta2,
                scale=config.matrix_scale,
                polar=config.matrix_polar,
            )
        if adam_groups:
            self.optimizers["adam"] = adam(
                _parameters(g for g in adam_groups if g.name not in MATRICES),
                config.adam_lr,
                config.adam_betas,
                config.adam_eps,
                decayed=_parameters(g for g in adam_groups if g.name in MATRICES),
                weight_decay=config.matrix_weight_decay,
            )

    def factor(self, step: int) -> float:
        """The schedule's factor on both learning rates at `step`, counted from 0."""
        c = self.config
        return wsd_factor(step, self.steps, c.warmup_steps, c.cooldown, c.cooldown_shape)

    def lr(self, step: int) -> dict[OptimizerName, float]:
        """The learning rates at `step`."""
        factor = self.factor(step)
        return {"normuon": self.config.matrix_lr * factor, "adam": self.config.adam_lr * factor}

    def z_loss(self, step: int) -> float:
        """Coefficient of the z-loss at `step`: the configured one in the cooldown, else 0."""
        return self.config.z_loss if in_cooldown(step, self.steps, self.config.cooldown) else 0.0

    def step(self, step: int, want_norm: bool = False) -> Tensor | None:
        """Apply the gradients with the learning rates of `step`; clip them first if the configuration says so.

        A parameter whose gradient is None is skipped: value and optimizer state keep every bit. Returns the norm of all gradients before
        clipping, a scalar on their device, if `want_norm` or if they are clipped.
        """
        norm = self._gradient_norm(want_norm)
        lr = self.lr(step)
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = lr[name]
                if "max_weight_decay" in group:  # AdamC; NorMuon does this itself
                    group["weight_decay"] = group["max_weight_decay"] * self.factor(step)
            optimizer.step()
        return norm

    def only(self, accept: Callable[[str], bool]) -> None:
        """Drop the gradients of all parameters but those whose name `accept` accepts, so that the next `step` skips the others.

        `fusion_warmup` is `optimizer.only(is_fusion)` before `optimizer.step(step)`.
        """
        for name, parameter in self._named():
            if not accept(name):
                parameter.grad = None

    def zero_grad(self) -> None:
        """Set all gradients to None, so that a parameter without one in the next step is skipped rather than decayed."""
        for _, parameter in self._named():
            parameter.grad = None

    def _gradient_norm(self, wanted: bool) -> Tensor | None:
        clip = self.config.clip_norm
        if clip is None and not wanted:
            return None
        parameters = [p for _, p in self._named() if p.grad is not None]
        norm = gradient_norm(parameters)
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        return norm

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [named for group in self.groups for named in group.parameters]

    def state_dict(self) -> dict[str, Tensor]:
        """`{parameter name}.{kind}` -> tensor: momentum, second_moment (NorMuon), step, exp_avg, exp_avg_sq (Adam).

        The tensors are the live state, not copies: save or clone them before the next step. None shares memory with another. They are cut
        over processes as their parameters are.
        """
        tensors = {}
        for group in self.groups:
            state = self.optimizers[group.optimizer].state
            for name, parameter in group.parameters:
                tensors.update({f"{name}.{kind}": tensor for kind, tensor in state[parameter].items()})
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state written by `state_dict`, of whole tensors, on any device. Nothing is changed unless all of it fits.

        Raises ValueError naming the first key that is missing, unexpected or of another shape.
        """
        own = self.state_dict()
        for key, tensor in own.items():
            if key not in tensors:
                raise ValueError(f"optimizer state: {key} is missing")
            if tensors[key].shape != tensor.shape:
                raise ValueError(f"optimizer state: {key} has shape {list(tensors[key].shape)}, the model needs {list(tensor.shape)}")
        for key in tensors:
            if key not in own:
                raise ValueError(f"optimizer state: {key} belongs to no parameter of the model")
        with torch.no_grad():
            for key, tensor in own.items():
                put(tensor, tensors[key])


def _parameters(groups: Iterable[ParameterGroup]) -> list[nn.Parameter]:
    return [parameter for group in groups for _, parameter in group.parameters]
