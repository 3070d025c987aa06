"""The objective (Eq. 12) over the passes, through a head that never holds all logits at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fullband.feedback.multipass import PassStates

IGNORE = -100  # targets that are not scored
CHUNK_LOGITS = 2**22  # logits held at once, as elements (16 MiB in float32)


def token_losses(states_ND: Tensor, head_weight_VD: Tensor, targets_N: Tensor, chunk_logits: int = CHUNK_LOGITS) -> tuple[Tensor, Tensor]:
    """(cross-entropy, squared log-sum-exp), both [N] in float32 or better; 0 where the target is ignored.

    The logits of a chunk of rows are made, used and forgotten; backward makes them again.
    """
    rows = max(1, chunk_logits // head_weight_VD.shape[0])
    if states_ND.shape[0] <= rows:
        return _chunk_losses(states_ND, head_weight_VD, targets_N)
    parts = [
        checkpoint(_chunk_losses, states, head_weight_VD, targets, use_reentrant=False)
        if torch.is_grad_enabled()
        else _chunk_losses(states, head_weight_VD, targets)
        for states, targets in zip(states_ND.split(rows), targets_N.split(rows), strict=True)
    ]
    return torch.cat([nll for nll, _ in parts]), torch.cat([square for _, square in parts])


def token_losses_reference(states_ND: Tensor, head_weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """The same from all logits at once."""
    logits = F.linear(states_ND, head_weight_VD)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = F.cross_entropy(logits, targets_N, ignore_index=IGNORE, reduction="none")
    return nll, torch.logsumexp(logits, dim=-1).square() * (targets_N != IGNORE)


def _chunk_losses(states_ND: Tensor, head_weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(states_ND, head_weight_VD)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_sum = torch.logsumexp(logits, dim=-1)
    scored = targets_N != IGNORE
    target_logits = logits.gather(-1, targets_N.clamp(min=0)[:, None])[:, 0]
    return (log_sum - target_logits) * scored, log_sum.square() * scored


@dataclass(frozen=True)
class PassLoss:
    """Sums of cross-entropy (nats) and counts for one pass; divide once.

    total / count                 over all scored positions (its plain prefix included, at pass 1's loss)
    fused / fused_count           over t > p_k only
    plain_there                   pass 1's sum over those same positions: fused < plain_there is what feedback is for
    """

    total: Tensor
    count: Tensor
    fused: Tensor
    fused_count: Tensor
    plain_there: Tensor


@dataclass(frozen=True)
class MultipassLoss:
    """`objective` is the sum to differentiate, already divided by `denominator`; `passes[k-1]` are pass k's detached sums."""

    objective: Tensor
    passes: list[PassLoss]


def multipass_loss(
    outputs: list[PassStates],
    head_weight_VD: Tensor,
    targets_BT: Tensor,
    denominator: Tensor | float,
    loss_weight: float = 1.0,
    z_loss: float = 0.0,
    chunk_logits: int = CHUNK_LOGITS,
) -> MultipassLoss:
    """Eq. 12: L_1 + λ/(K-1) Σ_k L_k, every L_k a sum over positions divided by the same `denominator`.

    denominator   number of scored targets in the whole step (all microbatches and ranks), so the split does not matter
    loss_weight   λ;  z_loss  coefficient of log²Z, weighted like the cross-entropy

    A pass that starts behind its prefix takes pass 1's loss there: pass 1's position t weighs 1 + λ/(K-1) #{k: t < start_k}.
    """
    weight = loss_weight / max(1, len(outputs) - 1)
    length = targets_BT.shape[1]
    losses = []
    for output in outputs:
        states, targets = output.states, targets_BT[:, output.start :]
        nll, square = token_losses(states.reshape(-1, states.shape[-1]), head_weight_VD, targets.reshape(-1), chunk_logits)
        losses.append((nll.view(targets.shape), square.view(targets.shape)))
    plain_nll, plain_square = losses[0]
    slots = torch.arange(length, device=targets_BT.device)
    plain_weight = torch.ones(length, device=targets_BT.device, dtype=plain_nll.dtype)
    for output in outputs[1:]:
        plain_weight = plain_weight + weight * (slots < output.start).to(plain_weight.dtype)
    objective = ((plain_nll + z_loss * plain_square) * plain_weight).sum()
    for nll, square in losses[1:]:
        objective = objective + weight * (nll + z_loss * square).sum()
    scored = targets_BT != IGNORE
    passes = [_pass_loss(output, nll.detach(), plain_nll.detach(), scored) for output, (nll, _) in zip(outputs, losses, strict=True)]
    return MultipassLoss(objective / denominator, passes)


def _pass_loss(output: PassStates, nll: Tensor, plain_nll: Tensor, scored: Tensor) -> PassLoss:
    slots = torch.arange(scored.shape[1], device=scored.device)[None]
    prefix = output.prefix.to(scored.device)[:, None] if isinstance(output.prefix, Tensor) else output.prefix
    fused = slots > prefix
    total = plain_nll[:, : output.start].sum() + nll.sum() if output.k > 1 else nll.sum()
    return PassLoss(
        total=total,
        count=scored.sum(),
        fused=(nll * fused[:, output.start :]).sum(),
        fused_count=(scored & fused).sum(),
        plain_there=(plain_nll * fused).sum(),
    )
