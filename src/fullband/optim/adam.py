"""Adam for everything that NorMuon does not take (embedding, norms, head gates: no weight decay, section 4), or AdamW for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def adam(
    parameters: Sequence[nn.Parameter],
    lr: float = 5e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    epsilon: float = 1e-8,
    decayed: Sequence[nn.Parameter] = (),
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """`torch.optim.AdamW` with `weight_decay` on the `decayed` parameters alone; its state (`step`, `exp_avg`, `exp_avg_sq`) made at once.

    Without `decayed` it is Adam. The group with weight decay has the key `max_weight_decay`, for schedules such as AdamC.
    Torch makes the state at a parameter's first gradient; a checkpoint would then lack what has had none yet, such as the fusion's
    parameters before feedback is switched on. The fused kernel is one call for dozens of tiny tensors; MPS keeps torch's default.
    """
    everything = [*decayed, *parameters]
    fused = all(p.device.type in ("cpu", "cuda") for p in everything)
    groups: list[dict[str, Any]] = []
    if decayed:
        groups.append({"params": list(decayed), "weight_decay": weight_decay, "max_weight_decay": weight_decay})
    if parameters:
        groups.append({"params": list(parameters)})
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=epsilon, weight_decay=0.0, fused=fused or None)
    for p in everything:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(p, memory_format=torch.contiguous_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.contiguous_format),
        }
    return optimizer
