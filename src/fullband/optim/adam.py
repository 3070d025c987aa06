"""Adam for everything that NorMuon does not take: embedding, norms, head gates (section 4: no weight decay)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def adam(
    parameters: Sequence[nn.Parameter], lr: float = 5e-4, betas: tuple[float, float] = (0.9, 0.95), epsilon: float = 1e-8
) -> torch.optim.Adam:
    """`torch.optim.Adam` without weight decay, its state (`step`, `exp_avg`, `exp_avg_sq`) made at once.

    Torch makes the state at a parameter's first gradient; a checkpoint would then lack what has had none yet, such as the fusion's
    parameters before feedback is switched on. The fused kernel is one call for dozens of tiny tensors; MPS keeps torch's default.
    """
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    optimizer = torch.optim.Adam(parameters, lr=lr, betas=betas, eps=epsilon, weight_decay=0.0, fused=fused or None)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(p, memory_format=torch.contiguous_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.contiguous_format),
        }
    return optimizer
