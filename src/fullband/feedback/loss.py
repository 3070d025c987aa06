"""The objective (Eq. 12) over the passes, through a head that never holds all logits at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fullband.feedback.multipass import PassStates

IGNORE = -100  # targets that are not scored
CHUNK_LOGITS = 2**24  # logits held at once, as elements (64 MiB in float32); fewer cost time at large vocabularies (benchmarks/head)


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


def weighted_loss(
    states_ND: Tensor,
    head_weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    z_loss: float = 0.0,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """(Σ weight · (cross-entropy + z_loss · log²Z), the detached cross-entropies [N]).

    The weights are known, so a chunk's gradient is made while its logits are still there: nothing is computed twice, and what is kept
    for backward is the gradient, as large as states and head weight. Not so in float16: there a gradient vanishes that is made before a
    GradScaler's factor has come back to it, so it is made in backward.
    """
    differentiated = torch.is_grad_enabled() and (states_ND.requires_grad or head_weight_VD.requires_grad)
    if differentiated and _compute_dtype(states_ND) != torch.float16:
        return _WeightedLoss.apply(states_ND, head_weight_VD, targets_N, weights_N, z_loss, chunk_logits)
    nll, square = token_losses(states_ND, head_weight_VD, targets_N, chunk_logits)
    return ((nll + z_loss * square) * weights_N).sum(), nll.detach()


def _compute_dtype(states: Tensor) -> torch.dtype:
    """What the logits are made in: autocast's type where it is on."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, targets: Tensor, weights: Tensor, z_loss: float, chunk_logits: int) -> Any:
        device = states.device
        dtype = _compute_dtype(states)
        precise = torch.promote_types(dtype, torch.float32)
        head_used = head.to(dtype)
        to_states = torch.empty_like(states, memory_format=torch.contiguous_format)
        to_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        nll = torch.empty(len(states), device=device, dtype=precise)
        objective = torch.zeros((), device=device, dtype=precise)
        rows = max(1, chunk_logits // len(head))
        for start in range(0, len(states), rows):
            here = slice(start, start + rows)
            chunk, target = states[here].to(dtype), targets[here].clamp(min=0)[:, None]
            scored = targets[here] != IGNORE
            weight = weights[here] * scored
            logits = F.linear(chunk, head_used).to(precise)
            target_logits, peak = logits.gather(-1, target)[:, 0], logits.amax(dim=-1)
            exponentials = logits.sub_(peak[:, None]).exp_()  # from here on everything is written over the logits
            total = exponentials.sum(dim=-1)
            log_sum = total.log() + peak
            nll[here] = (log_sum - target_logits) * scored
            objective += (weight * (nll[here] + z_loss * log_sum.square())).sum()
            # d objective / d logits = weight · ((1 + 2 z log Z) softmax - onehot)
            gradient = exponentials.mul_((weight * (1 + 2 * z_loss * log_sum) / total)[:, None])
            gradient.scatter_add_(-1, target, -weight[:, None])
            gradient = gradient.to(dtype)
            to_states[here] = gradient @ head_used
            if to_head is not None:
                to_head.addmm_(gradient.T, chunk) if to_head.dtype == dtype else to_head.add_(gradient.T @ chunk)
        ctx.save_for_backward(states, head, targets, weights)
        ctx.options = z_loss, chunk_logits
        ctx.gradients = to_states, to_head
        ctx.mark_non_differentiable(nll)
        return objective, nll

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        if ctx.gradients is None or torch.is_grad_enabled():  # a second backward, or one to be differentiated: the plain way
            states, head, targets, weights = ctx.saved_tensors
            z_loss, chunk_logits = ctx.options
            with torch.enable_grad():
                nll, square = token_losses(states, head, targets, chunk_logits)
                objective = ((nll + z_loss * square) * weights).sum()
            wanted = [x for x in (states, head) if x.requires_grad]
            found = iter(torch.autograd.grad(objective, wanted, upstream[0], create_graph=torch.is_grad_enabled()))
            return *(next(found) if x.requires_grad else None for x in (states, head)), None, None, None, None
        (to_states, to_head), ctx.gradients = ctx.gradients, None  # given away: autograd copies nothing
        return to_states.mul_(upstream[0]), None if to_head is None else to_head.mul_(upstream[0]), None, None, None, None


@dataclass(frozen=True)
class PassLoss:
    """Sums of cross-entropy (nats) and counts for one pass; divide once.

    total / count                 over all scored positions (its plain prefix included, at pass 1's loss)
    fused / fused_count           over t > p_k only, or where a mask of plain positions says fused
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
    """
    targets = [targets_BT[:, output.start :] for output in outputs]
    weights = [w.expand(t.shape) for w, t in zip(pass_weights(outputs, loss_weight), targets, strict=True)]
    objective, nll = weighted_loss(
        torch.cat([output.states.flatten(0, 1) for output in outputs]),
        head_weight_VD,
        torch.cat([t.flatten() for t in targets]),
        torch.cat([w.flatten() for w in weights]) / denominator,
        z_loss,
        chunk_logits,
    )
    losses = [part.view_as(t) for part, t in zip(nll.split([t.numel() for t in targets]), targets, strict=True)]
    scored = targets_BT != IGNORE
    passes = [_pass_loss(output, nll, losses[0], scored) for output, nll in zip(outputs, losses, strict=True)]
    return MultipassLoss(objective, passes)


def pass_weights(outputs: list[PassStates], loss_weight: float) -> list[Tensor]:
    """What the loss of each computed position weighs in Eq. 12, [T - start] for each pass: 1 in pass 1, λ/(K-1) in pass k.

    A pass that starts after its prefix takes pass 1's loss there: pass 1's position t weighs 1 + λ/(K-1) #{k: t < start_k}.
    """
    share = loss_weight / max(1, len(outputs) - 1)
    first_BTD = outputs[0].states
    precise = torch.promote_types(first_BTD.dtype, torch.float32)
    plain_T, *later = (torch.full(output.states.shape[1:2], share, dtype=precise, device=first_BTD.device) for output in outputs)
    plain_T.fill_(1)
    for output in outputs[1:]:
        plain_T[: output.start] += share
    return [plain_T, *later]


def objective_by_token(outputs: list[PassStates], head_weight_VD: Tensor, targets_BT: Tensor, loss_weight: float = 1.0) -> Tensor:
    """Each position's part of Eq. 12's objective, [B, T] in float32 or better, undivided and without z-loss: for trainers that sum the
    loss in ways of their own. The sum over positions is `multipass_loss(…, denominator=1).objective`."""
    parts = []
    for output, weight in zip(outputs, pass_weights(outputs, loss_weight), strict=True):
        targets = targets_BT[:, output.start :]
        nll = token_losses(output.states.flatten(0, 1), head_weight_VD, targets.flatten())[0].view(targets.shape)
        parts.append(F.pad(weight * nll, (output.start, 0)))
    return sum(parts[1:], parts[0])


def _pass_loss(output: PassStates, nll: Tensor, plain_nll: Tensor, scored: Tensor) -> PassLoss:
    fused = output.fused(scored.shape[1], scored.device)
    total = plain_nll[:, : output.start].sum() + nll.sum() if output.k > 1 else nll.sum()
    return PassLoss(
        total=total,
        count=scored.sum(),
        fused=(nll * fused[:, output.start :]).sum(),
        fused_count=(scored & fused).sum(),
        plain_there=(plain_nll * fused).sum(),
    )
