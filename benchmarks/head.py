"""The head that never holds all logits: memory and time against plain cross-entropy.

Forward and backward from top states [tokens, width] and the head weight [vocabulary, width], three ways:
chunked      feedback/loss.weighted_loss, what training uses: a chunk's gradient is made while its logits exist
checkpointed feedback/loss.token_losses, for losses whose weights come later: backward makes the logits again
plain        all logits at once, F.cross_entropy and the z-loss from logsumexp

Target: the chunked head's peak at most 0.25x of plain. The gradient of the head weight is part of every peak.

    python -m benchmarks.head                  2048 x 100,352 at width 512
    python -m benchmarks.head --width 1536     the paper's width
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peak_memory import METHOD, peak_bytes
from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import interleave
from fullband.feedback.loss import CHUNK_LOGITS, token_losses, weighted_loss

TARGETS = {"memory": 0.25}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--tokens", type=int, default=2048, help="(default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=100_352, help="(default %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="(default %(default)s)")
    parser.add_argument("--z-loss", type=float, default=0.0, help="coefficient of log²Z; plain pays extra for it (default %(default)s)")
    parser.add_argument("--chunk-logits", type=int, default=CHUNK_LOGITS, help="logits held at once (default %(default)s)")
    chosen = parser.parse_args(arguments)
    about = prepare(chosen)

    states_ND = torch.randn(chosen.tokens, chosen.width, requires_grad=True)
    head_VD = torch.randn(chosen.vocabulary, chosen.width).mul_(0.02).requires_grad_()
    targets_N = torch.randint(chosen.vocabulary, (chosen.tokens,))
    ways = {"chunked": chunked, "checkpointed": checkpointed, "plain": plain}
    candidates = {
        name: partial(forward_backward, way, states_ND, head_VD, targets_N, chosen.z_loss, chosen.chunk_logits)
        for name, way in ways.items()
    }
    memory = {name: peak_bytes(run) for name, run in candidates.items()}
    timings = interleave(candidates, chosen.rounds, chosen.clock, "head", warm_up=False)
    result = about | {"targets": TARGETS, "memory_method": METHOD}
    for name in candidates:
        result[name] = {"seconds": timings.best(name), "peak_bytes": memory[name]}
    for name in ("chunked", "checkpointed"):
        result[name] |= {
            "time_ratio": timings.ratio(name, "plain"),
            "spread": timings.spread(name, "plain"),
            "memory_ratio": memory[name] / memory["plain"],
        }
    rows = []
    for name in candidates:
        r = {"time_ratio": 1.0, "memory_ratio": 1.0} | result[name]
        peak = f"{r['peak_bytes'] / 2**20:,.0f} MiB"
        rows.append([name, f"{r['seconds']:.2f} s", f"{r['time_ratio']:.2f}x", peak, f"{r['memory_ratio']:.2f}x"])
    title = f"Head, {chosen.tokens} x {chosen.vocabulary:,} logits, width {chosen.width} (target: memory {TARGETS['memory']}x)"
    show(title, ("way", "time", "of plain", "peak", "of plain"), rows, result, chosen.json)
    return result


def forward_backward(
    way: Callable[..., Tensor], states_ND: Tensor, head_VD: Tensor, targets_N: Tensor, z_loss: float, chunk_logits: int
) -> None:
    way(states_ND, head_VD, targets_N, z_loss, chunk_logits).backward()
    states_ND.grad = head_VD.grad = None


def chunked(states_ND: Tensor, head_VD: Tensor, targets_N: Tensor, z_loss: float, chunk_logits: int) -> Tensor:
    weights_N = torch.full(targets_N.shape, 1 / len(targets_N))
    return weighted_loss(states_ND, head_VD, targets_N, weights_N, z_loss, chunk_logits)[0]


def checkpointed(states_ND: Tensor, head_VD: Tensor, targets_N: Tensor, z_loss: float, chunk_logits: int) -> Tensor:
    nll, square = token_losses(states_ND, head_VD, targets_N, chunk_logits)
    return (nll + z_loss * square).mean()


def plain(states_ND: Tensor, head_VD: Tensor, targets_N: Tensor, z_loss: float, chunk_logits: int) -> Tensor:
    logits = F.linear(states_ND, head_VD)
    loss = F.cross_entropy(logits, targets_N)
    return loss + z_loss * torch.logsumexp(logits, dim=-1).square().mean() if z_loss else loss


if __name__ == "__main__":
    main()
