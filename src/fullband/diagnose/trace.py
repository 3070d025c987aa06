"""What repeated passes do to rows of text: loss and state change by pass (Figs. 3 and 10), and the gap to exact evaluation.

Position t (counted from 0) is final after t + 1 passes, whatever the model: within the wavefront nothing can move, so an average over
a whole row partly measures its length. Positions are therefore kept apart:

    final    t < k: pass k and exact evaluation agree there
    early    t < T / 4
    past     t >= horizon = min(passes, T // 2): the wavefront reaches none of them within the first `horizon` passes, so over these
             passes one and the same set of positions shows what the map does by itself

Nothing is kept of a pass but a few numbers, a sample of positions from the last passes, and the states the next one needs: memory
does not grow with the number of passes. The loop stops early only at a fixed point, where a pass returned the states it was given, bit
for bit, so that no later one can change anything. A cycle of whole rows cannot be a reason to stop: every row reaches its fixed point
after T passes at the latest. What returns past the wavefront, and is only caught by it, is measured by `Return`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.data.batch import IGNORE, Batch
from fullband.diagnose.numbers import Arrival, PassChange, PassRecord, Return, Trace
from fullband.feedback.by_passes import iterate_passes
from fullband.feedback.loss import token_losses
from fullband.feedback.passes import FeedbackModel, below, check_length, sequential
from fullband.feedback.settling import Changes, find_front, passes_by_position, quantile, rounding, settled_from, state_norms
from fullband.trunk.pointwise import lengths

LAGS = 8  # longest period that is looked for, in passes
SAMPLE = 512  # positions past the wavefront whose last states are kept for it
KL_POSITIONS = 64  # positions whose distributions are compared with those of exact evaluation
TOLERANCES = (1e-1, 1e-2, 1e-3)
SHRINKS = 0.99  # late change ratio a pass from which on a change no longer counts as shrinking: it would take 70 passes to halve

Progress = Callable[[int, int], None]  # (done, of how many)


class _Positions:
    """Which positions a statistic covers, and the losses there."""

    def __init__(self, batch: Batch, passes: int):
        self.depth_BT = torch.where(batch.documents >= 0, batch.positions, -1)
        self.real_BT = self.depth_BT >= 0
        self.length = int(self.depth_BT.max()) + 1
        self.horizon = min(passes, self.length // 2)
        self.early_BT = self.real_BT & (self.depth_BT < max(1, self.length // 4))
        self.past_BT = self.depth_BT >= self.horizon
        self.scored_BT = (batch.targets != IGNORE) & self.real_BT
        self.targets = batch.targets

    def losses(self, model: FeedbackModel, states_BTD: Tensor) -> Tensor:
        nll, _ = token_losses(states_BTD.flatten(0, 1), model.trunk.head_weight, self.targets.flatten())
        return nll.view(self.targets.shape)

    def mean_loss(self, nll_BT: Tensor, where_BT: Tensor) -> float | None:
        chosen = nll_BT[where_BT & self.scored_BT]
        return float(chosen.double().mean()) if len(chosen) else None


@torch.no_grad()
def trace_passes(model: FeedbackModel, batch: Batch, passes: int, tolerance: float = 1e-2, progress: Progress | None = None) -> Trace:
    """Read `batch` again and again, up to `passes` (>= 3) times, and position by position to compare with.

    tolerance  relative change of a state below which it counts as settled
    progress   called with (passes done, of how many), first before the exact evaluation
    Raises ValueError for fewer passes, and for rows that do not fit the context.
    """
    if passes < 3:
        raise ValueError(f"a change ratio takes at least 3 passes, not {passes}")
    check_length(model, batch.shape[1])
    report = progress or (lambda done, total: None)
    batch = batch.to(model.trunk.device)
    inputs, _ = below(model, batch.tokens, batch.layout.with_plain(None))
    positions = _Positions(batch, passes)
    report(0, passes)
    exact_BTD = sequential(model, inputs)[1].top_BTD
    exact = _Exact(model, exact_BTD, positions)
    records: list[PassRecord] = []
    changes = Changes(int(positions.past_BT.sum()), positions.horizon - 1, rounding(exact_BTD.dtype), exact_BTD.device)
    returns = _Returns(positions.past_BT)
    previous_BTD: Tensor | None = None
    fixed_at = None
    arrived_BT = torch.ones_like(batch.tokens)  # the pass after the last one that was too far from exact evaluation
    for k, states_BTD in enumerate(islice(iterate_passes(model, inputs), passes), start=1):
        measurable = k <= positions.horizon
        moved = None
        change_BT = torch.empty(0)
        if previous_BTD is not None:
            difference_BTD = states_BTD - previous_BTD
            moved = float((difference_BTD != 0).any(-1)[positions.real_BT].double().mean())
            change_BT = lengths(difference_BTD).float()
            if measurable:
                changes.add((change_BT / state_norms(states_BTD))[positions.past_BT])
        if measurable:
            returns.add(states_BTD)
        gap_BT = exact.distance(states_BTD)
        arrived_BT = torch.where(gap_BT < tolerance, arrived_BT, k + 1)
        records.append(_record(model, k, states_BTD, gap_BT, change_BT if moved is not None else None, moved, positions, exact))
        report(k, passes)
        if moved == 0:
            fixed_at = k
            break
        previous_BTD = states_BTD
    ratios_N, late_N = (changes.ratios(), changes.late_ratios()) if positions.horizon > 2 else (torch.empty(0), torch.empty(0))
    fixed = fixed_at is not None and fixed_at <= positions.horizon
    return Trace(
        rows=batch.shape[0],
        length=positions.length,
        passes=passes,
        horizon=positions.horizon,
        records=records,
        ratio_median=quantile(ratios_N, 0.5),
        ratio_p99=quantile(ratios_N, 0.99),
        late_ratio=quantile(late_N, 0.5),
        shrinking=float(((late_N < SHRINKS) | (changes.latest() < tolerance)).double().mean()) if len(late_N) else math.nan,
        passes_needed={wanted: _needed(records, wanted, fixed) for wanted in sorted({*TOLERANCES, tolerance}, reverse=True)},
        returns=returns.measured(),
        arrival=_arrival(arrived_BT, positions, records[-1].k),
        loss_exact=exact.loss,
        loss_exact_early=exact.loss_early,
        loss_exact_past=exact.loss_past,
        exact_rms=_rms(exact_BTD, positions.real_BT),
        unigram=_unigram(batch.targets[positions.scored_BT], model.trunk.vocab_size),
        uniform=math.log(model.trunk.vocab_size),
        fixed_at=fixed_at,
        tolerance=tolerance,
    )


class _Exact:
    """Exact evaluation, and how far a pass is from it."""

    def __init__(self, model: FeedbackModel, states_BTD: Tensor, positions: _Positions):
        self.states_BTD, self.norms_BT = states_BTD, state_norms(states_BTD)
        nll_BT = positions.losses(model, states_BTD)
        self.loss = positions.mean_loss(nll_BT, positions.real_BT) or 0.0
        self.loss_early = positions.mean_loss(nll_BT, positions.early_BT)
        self.loss_past = positions.mean_loss(nll_BT, positions.past_BT)
        self.sample_N = _spread(positions.past_BT, KL_POSITIONS)
        self.log_probabilities_NV = self._log_probabilities(model, states_BTD)

    def _log_probabilities(self, model: FeedbackModel, states_BTD: Tensor) -> Tensor:
        logits_NV = F.linear(states_BTD.flatten(0, 1)[self.sample_N], model.trunk.head_weight)
        return torch.log_softmax(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), dim=-1)

    def distance(self, states_BTD: Tensor) -> Tensor:
        return lengths(states_BTD - self.states_BTD).float() / self.norms_BT

    def kl(self, model: FeedbackModel, states_BTD: Tensor) -> float | None:
        if not len(self.sample_N):
            return None
        found_NV = self._log_probabilities(model, states_BTD)
        divergence_N = (self.log_probabilities_NV.exp() * (self.log_probabilities_NV - found_NV)).sum(-1)
        return float(divergence_N.double().mean().clamp(min=0))


class _Returns:
    """The last states of a sample of positions past the wavefront."""

    def __init__(self, past_BT: Tensor):
        self.sample_N = _spread(past_BT, SAMPLE)
        self.states: deque[Tensor] = deque(maxlen=2 * LAGS)

    def add(self, states_BTD: Tensor) -> None:
        self.states.append(states_BTD.flatten(0, 1)[self.sample_N])

    def measured(self) -> Return:
        states = list(self.states)
        lags = min(LAGS, len(states) // 2)

        def distance(lag: int) -> float:
            pairs = [(states[-i], states[-i - lag]) for i in range(1, lags + 1)]
            return float(torch.stack([lengths(a - b).double().mean() for a, b in pairs]).mean()) if pairs else math.nan

        step = distance(1) if lags else math.nan
        return Return([distance(lag) / step if step > 0 else math.nan for lag in range(1, lags + 1)])


def _record(
    model: FeedbackModel,
    k: int,
    states_BTD: Tensor,
    gap_BT: Tensor,
    change_BT: Tensor | None,
    moved: float | None,
    positions: _Positions,
    exact: _Exact,
) -> PassRecord:
    nll_BT = positions.losses(model, states_BTD)
    norms_BT = state_norms(states_BTD)
    loss = positions.mean_loss(nll_BT, positions.real_BT) or 0.0
    measurable = k <= positions.horizon

    def change(where_BT: Tensor) -> PassChange | None:
        return None if change_BT is None else _change(change_BT, norms_BT, where_BT)

    return PassRecord(
        k=k,
        loss=loss,
        loss_early=positions.mean_loss(nll_BT, positions.early_BT),
        loss_behind=positions.mean_loss(nll_BT, positions.real_BT & (positions.depth_BT < k)),
        loss_past=positions.mean_loss(nll_BT, positions.past_BT) if measurable else None,
        moved=moved,
        change=change(positions.real_BT),
        change_front=change(positions.depth_BT == k - 1),
        change_past=change(positions.past_BT) if measurable else None,
        state_rms=_rms(states_BTD, positions.real_BT),
        gap_loss=loss - exact.loss,
        gap_state=float(gap_BT[positions.real_BT].double().mean()),
        gap_state_past=float(gap_BT[positions.past_BT].double().mean()) if measurable else None,
        gap_kl_past=exact.kl(model, states_BTD) if measurable else None,
    )


def _change(change_BT: Tensor, norms_BT: Tensor, where_BT: Tensor) -> PassChange | None:
    change_N = change_BT[where_BT]
    if not len(change_N):
        return None
    relative_N = change_N / norms_BT[where_BT]
    means = (float(change_N.double().mean()), float(relative_N.double().mean()))
    return PassChange(*means, median=quantile(relative_N, 0.5), p99=quantile(relative_N, 0.99))


def _needed(records: Sequence[PassRecord], tolerance: float, fixed: bool) -> int | None:
    """By `settled_from`, over the passes that were measured; at a fixed point all later ones rest too."""
    p99 = [record.change_past.p99 for record in records if record.change_past is not None]
    return settled_from([*p99, 0.0] if fixed else p99, tolerance)


def _arrival(arrived_BT: Tensor, positions: _Positions, last: int) -> Arrival:
    depth_BT, length = positions.depth_BT, positions.length
    real_BT = positions.real_BT
    shown, found = passes_by_position(arrived_BT[real_BT], depth_BT[real_BT])
    median, p90 = ([None if k > last else int(k) for k in passes] for passes in found)
    second_half = arrived_BT[depth_BT >= length // 2]
    late, in_time = (float((second_half <= k).double().mean()) for k in (last, positions.horizon))
    whole = length if in_time >= 0.95 else positions.horizon
    third_BT = (depth_BT >= whole // 2) & (depth_BT < 3 * whole // 4)
    last_BT = (depth_BT >= 3 * whole // 4) & (depth_BT < whole)
    slope = math.nan
    if bool(third_BT.any()) and bool(last_BT.any()):
        later, distance = (float(x[last_BT].double().mean() - x[third_BT].double().mean()) for x in (arrived_BT, depth_BT))
        slope = later / distance
    return Arrival(shown, median, p90, late, slope, find_front(shown, found, positions.horizon, length))


def _spread(where_BT: Tensor, limit: int) -> Tensor:
    """Up to `limit` of the marked places, evenly spread, as indices into the flattened [B·T]."""
    places = where_BT.flatten().nonzero()[:, 0]
    if len(places) <= limit:
        return places
    return places[torch.linspace(0, len(places) - 1, limit, device=places.device).round().long()]


def _rms(states_BTD: Tensor, where_BT: Tensor) -> float:
    return float(states_BTD[where_BT].double().square().mean().sqrt())


def _unigram(targets_N: Tensor, vocabulary: int) -> float:
    """Cross-entropy in nats of each target under the frequencies of all others. What is seen once is new to the others: such tokens share
    their part of the text evenly with all that were not seen. (The entropy of the frequencies themselves is far too low a bar where there
    are fewer targets than words.)"""
    counts = torch.bincount(targets_N).double()
    total, once = float(counts.sum()), float((counts == 1).sum())
    again = counts[counts > 1]
    known = float((again * ((again - 1) * (total - once) / (again.sum() - len(again)) / total).log()).sum()) if len(again) else 0.0
    new = once * math.log(once / total / max(1.0, vocabulary - float((counts > 1).sum()))) if once else 0.0
    return -(known + new) / total
