"""Which state is fed back (section 5), as an ablation: the paper's is the top state, which needs nothing of this."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fullband.config import TrunkConfig


class FedBack(nn.Module):
    """The residual stream after the first or the middle layer, or a learned mix of all depths (softmax weights, the stack's input
    included, as in the Feedback Transformer), at a root mean square of 1.

    Such a trunk hands on both states side by side, [..., 2D]: the head reads the top state, the first D, and feedback the last D.
    """

    def __init__(self, config: TrunkConfig):
        super().__init__()
        self.depth = {"first": 1, "middle": (config.layers + 1) // 2}.get(config.fed_back)
        self.eps = config.norm_eps
        if self.depth is None:
            self.mix = nn.Parameter(torch.zeros(config.layers + 1))

    def forward(self, streams: list[Tensor]) -> Tensor:
        """[B, T, D] of the residual stream [B, T, D] at depths 0 (the input) to L."""
        if self.depth is not None:
            state = streams[self.depth]
        else:
            state = torch.stack([share * stream for share, stream in zip(self.mix.softmax(dim=0), streams, strict=True)]).sum(dim=0)
        return nn.functional.rms_norm(state, state.shape[-1:], eps=self.eps)
