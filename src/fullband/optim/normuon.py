"""NorMuon: momentum, orthogonalised, then normalised neuron by neuron (Li et al., arXiv:2510.05491).

For a weight W [fan_out, fan_in] with gradient G, at every step:

    M <- mu M + G                                         momentum
    O <- polar(M)                                         singular values to about 1
    v <- beta2 v + (1 - beta2) mean over columns of O^2   one number per neuron (row)
    U <- O / (sqrt(v) + eps)                              rows equalised
    W <- (1 - lr wd lr/lr_max) W - lr f U / |U|           f = the Frobenius norm of the update at lr 1 (`update_scale`)

f is O's own norm times a factor of the shape (`spectral`, `match_rms`), or the same whatever O is (`exact_rms`). The paper's Algorithm 1 is
`exact_rms` with Muon's quintic as polar; its authors' code and microsoft/dion, whose defaults are ours, keep O's norm. They differ where a
gradient has few directions: O then has few singular values at 1 and a small norm. With a single one the update's root mean square (RMS)
is 0.2 by `exact_rms` and 0.2 / sqrt(min(fan_out, fan_in)) by `match_rms`. Compared in results/normuon-s3 and results/normuon-text.

The weight decay is AdamC's (Defazio 2025, arXiv:2506.02285): it falls with the learning rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fullband.optim.polar import Polar, polar_factor, polar_factor_reference, polynomial
from fullband.optim.sharded import by_owner, is_sharded, local, processes_of

Scale = Literal["spectral", "match_rms", "exact_rms"]
EPSILON = 1e-8

# Matrices are stacked up to this many elements: small ones share one call, large ones need no company and would cost memory.
MAX_STACK_ELEMENTS = 2**25


class NorMuon(torch.optim.Optimizer):
    """NorMuon with AdamC weight decay. Parameters of one shape are stacked and orthogonalised by one batched product.

    State of a parameter [fan_out, fan_in]: `momentum` [fan_out, fan_in] and `second_moment` [fan_out, 1], in the parameter's dtype but
    at least float32, made at construction. A parameter whose gradient is None is left alone: value and state keep every bit.

    `lr` is the group's maximum; a schedule sets `group["lr"]`, the decay compares it with `group["max_lr"]`. `polar_dtype` is the
    dtype of the orthogonalisation: by default bfloat16 on CUDA, where it is faster and enough, and the state's elsewhere.

    Raises ValueError for a parameter that is no matrix and for a value outside its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        beta2: float = 0.95,
        scale: Scale = "spectral",
        polar: Polar = "polar-express",
        epsilon: float = EPSILON,
        polar_dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("epsilon", epsilon)):
            if not value >= 0:
                raise ValueError(f"NorMuon: {name} must not be negative (given: {value})")
        for name, value in (("momentum", momentum), ("beta2", beta2)):
            if not 0 <= value < 1:
                raise ValueError(f"NorMuon: {name} must lie in [0, 1) (given: {value})")
        update_scale(scale, 1, 1)
        polynomial(polar)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "beta2": beta2,
            "scale": scale,
            "polar": polar,
            "epsilon": epsilon,
            "polar_dtype": polar_dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `torch.optim.Optimizer`. State is made here, so that a checkpoint is complete at any step."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("max_lr", group["lr"])
        for p in group["params"]:
            if p.ndim != 2:
                raise ValueError(f"NorMuon updates matrices; a parameter of shape {tuple(p.shape)} belongs to another optimizer")
            zeros = partial(torch.zeros_like, dtype=_state_dtype(p), memory_format=torch.contiguous_format)  # cut as the parameter is
            self.state[p] = {"momentum": zeros(p.detach()), "second_moment": zeros(p.detach()[:, :1])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`, which rounds the state to the parameter's dtype; here it keeps its own."""
        super().load_state_dict(state_dict)
        saved = [state_dict["state"][i] for group in state_dict["param_groups"] for i in group["params"]]
        for p, state in zip((p for group in self.param_groups for p in group["params"]), saved, strict=True):
            self.state[p] = {key: value.detach().to(p.device, _state_dtype(p), copy=True) for key, value in state.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group in self.param_groups:
            for stack in _stacks(group["params"]):
                self._update(stack, group, first)
                first += len(stack)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any], first: int) -> None:
        """One step for N parameters of one shape, of which `first` were updated before. Where they are cut over processes, each matrix is
        made whole for one of them (`by_owner`).

        Everything happens on stacks and is copied back: on a CPU a small model's step is spent calling operators, and torch's foreach
        functions with a scalar cost more there than the copies.
        """
        states = [self.state[p] for p in params]
        momenta = [local(state["momentum"]) for state in states]
        second_moments = [local(state["second_moment"]) for state in states]

        momentum = torch.stack(momenta).mul_(group["momentum"])  # [N, fan_out, fan_in]
        momentum.add_(torch.stack([local(p.grad) for p in params if p.grad is not None]))
        torch._foreach_copy_(momenta, momentum.unbind())

        second_moment = torch.stack(second_moments)
        directions = partial(_directions, group=group)
        if is_sharded(params[0]):
            update, row_scale, second_moment = by_owner(directions, momentum, second_moment, params[0], first)
        else:
            update, row_scale, second_moment = directions(momentum, second_moment)
        torch._foreach_copy_(second_moments, second_moment.unbind())

        own = [local(p) for p in params]
        weights = torch.stack(own).to(momentum.dtype).mul_(1 - adamc_decay(group["lr"], group["max_lr"], group["weight_decay"]))
        weights.addcmul_(update, row_scale, value=-group["lr"] * update_scale(group["scale"], *params[0].shape))
        torch._foreach_copy_(own, weights.unbind())


def _directions(momentum: Tensor, second_moment: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Of N whole matrices: the polar factors O of `momentum` [N, fan_out, fan_in], what each row of them is multiplied by [N, fan_out, 1],
    and the new second moments [N, fan_out, 1]; `second_moment` is written over."""
    dtype = group["polar_dtype"] or (torch.bfloat16 if momentum.is_cuda and momentum.dtype == torch.float32 else None)
    update = polar_factor(momentum, group["epsilon"], dtype, group["polar"]).to(momentum.dtype)

    row_norms = torch.linalg.vector_norm(update, dim=-1, keepdim=True)  # [N, fan_out, 1]
    second_moment = second_moment.lerp_(row_norms.square().div_(momentum.shape[-1]), 1 - group["beta2"])

    # Both Frobenius norms follow from the rows': no further pass over the matrices.
    row_scale = second_moment.sqrt().add_(group["epsilon"]).reciprocal_()
    norm = torch.ones_like(row_norms[:, :1]) if group["scale"] == "exact_rms" else torch.linalg.vector_norm(row_norms, dim=-2, keepdim=True)
    new_norm = torch.linalg.vector_norm(row_norms * row_scale, dim=-2, keepdim=True)
    return update, row_scale.mul_(norm.div_(new_norm.clamp_(min=EPSILON))), second_moment


def _stacks(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters that have a gradient, in lists of one shape, dtype and device, in their order; a process gets its share of a list."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for p in params:
        if p.grad is not None:
            alike[p.shape, p.dtype, p.device].append(p)
    for same in alike.values():
        size = max(1, processes_of(same[0]) * MAX_STACK_ELEMENTS // max(1, same[0].numel()))
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _state_dtype(p: Tensor) -> torch.dtype:
    # An average with weight 0.05 stalls in bfloat16: its increments fall below the last of 8 bits.
    return torch.promote_types(p.dtype, torch.float32)


def update_scale(scale: Scale, fan_out: int, fan_in: int) -> float:
    """Factor on the learning rate for the update of a [fan_out, fan_in] matrix.

    Of an update with singular values of about 1: `spectral`, sqrt(fan_out / fan_in), so that an input of RMS 1 changes the output by an RMS
    of lr (arXiv:2310.17813); `match_rms`, 0.2 sqrt(max(fan_out, fan_in)), the RMS that Adam's updates usually have (arXiv:2502.16982) if no
    singular value is missing. Of one with Frobenius norm 1: `exact_rms`, 0.2 sqrt(fan_out fan_in), that RMS whatever the rank
    (arXiv:2510.05491, Alg. 1). Raises ValueError for another name.
    """
    if scale == "spectral":
        return math.sqrt(fan_out / fan_in)
    if scale == "match_rms":
        return 0.2 * math.sqrt(max(fan_out, fan_in))
    if scale == "exact_rms":
        return 0.2 * math.sqrt(fan_out * fan_in)
    raise ValueError(f"NorMuon: scale must be 'spectral', 'match_rms' or 'exact_rms', got {scale!r}")


def adamc_decay(lr: float, max_lr: float, weight_decay: float) -> float:
    """The share of a weight that one step takes away: lr x wd x lr / lr_max."""
    return lr * weight_decay * (lr / max_lr) if max_lr else 0.0


def normuon_reference(
    weight: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    second_moment: Tensor,
    *,
    lr: float,
    max_lr: float,
    weight_decay: float = 0.01,
    mu: float = 0.95,
    beta2: float = 0.95,
    scale: Scale = "spectral",
    polar: Polar = "polar-express",
    epsilon: float = EPSILON,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step for one matrix, as the formulas above read, by SVD and row by row; nothing is changed in place.

    `weight`, `gradient`, `momentum` are [fan_out, fan_in], `second_moment` is [fan_out, 1]. Returns the new weight, momentum and second
    moment.
    """
    fan_out, fan_in = weight.shape
    momentum = mu * momentum + gradient
    orthogonal = polar_factor_reference(momentum, epsilon, polar)
    rows, moments = [], []
    for row, v in zip(orthogonal, second_moment, strict=True):
        v = beta2 * v + (1 - beta2) * (row**2).mean()
        moments.append(v)
        rows.append(row / (v.sqrt() + epsilon))
    update = torch.stack(rows)
    norms = {
        "spectral": orthogonal.norm() * math.sqrt(fan_out / fan_in),
        "match_rms": orthogonal.norm() * 0.2 * math.sqrt(max(fan_out, fan_in)),
        "exact_rms": 0.2 * math.sqrt(fan_out * fan_in),
    }
    if update.norm() > 0:
        update = update * norms[scale] / update.norm()
    weight = weight - lr * weight_decay * (lr / max_lr) * weight - lr * update
    return weight, momentum, torch.stack(moments)
