"""Do the states settle when passes are repeated? One set of rules, for `fullband diagnose` (Fig. 3) and the adaptive schedule alike.

A change travels at least one position a pass: position t (counted from 0) is final after t + 1 passes whatever the model, so only
positions the wavefront has not reached (t ≥ k) tell whether the map contracts, and only rows of at least twice as many positions
as passes hold enough of them. A state that rests for a pass and then moves on has not settled: what counts is where it stays.

A map that contracts settles every position after the same few passes. A front of results that wait for one another settles position t
after a number of passes that grows with t, however fast it runs: once it has crossed the row nothing moves, yet it was no contraction,
and the next longer row takes longer. `Front` tells the two apart. Since models are causal, the passes that position t takes do not depend
on what follows: growth with the position within a row and growth with the length of rows are one and the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fullband.feedback.by_passes import iterate_passes
from fullband.feedback.passes import FeedbackModel, below
from fullband.layout import NOWHERE, Layout
from fullband.trunk.pointwise import lengths

FLOOR = 1e-5  # relative change below which rounding, not the map, decides
GROWTH = 1.0  # passes by which settling must come later at the end of a row than at its half, to be a front: one is what can be counted
SHARE = 0.25  # and of the passes at its half: a front from the row's start doubles them; of 35 text models, 33 grew them by 0.17 at most
REST = 2  # passes that a state must rest at the end to have settled: after one it may move on


@dataclass(frozen=True)
class Settling:
    """What repeated passes did past the wavefront.

    relative_change   median over positions of ‖h^(k) - h^(k-1)‖ / ‖h^(k)‖, for k = 2, 3, …
    ratio_median/p99  over positions, of the geometric mean change ratio a pass: below 1 the change shrinks
    passes_needed     first k from which on the 99th percentile of relative change stayed below `tolerance` (`settled_from`); None = never
    measurable        whether rows were long enough to see past the wavefront
    front             how settling moves along the rows; None where not measurable
    """

    relative_change: list[float]
    ratio_median: float
    ratio_p99: float
    passes_needed: int | None
    tolerance: float
    measurable: bool
    front: Front | None = None

    def settled(self, ratio: float) -> bool:
        """States reach the tolerance, or both median and 99th percentile of the change ratio stay below `ratio`; and not one position
        after another (`Front.travels`)."""
        if self.front is not None and self.front.travels:
            return False
        return self.passes_needed is not None or (self.ratio_median < ratio and self.ratio_p99 < ratio)


@dataclass(frozen=True)
class Front:
    """The line through the passes that positions of the second half of the rows took to settle, in the median over rows or at the 90th
    percentile, whichever rises more. What did not settle counts as one pass more than were run, so a rise is a lower bound.

    slope      passes a position: 0 where the map contracts; `low` and `high` are the lines' of the two quarters of the row in it
    at_half    passes at the half of the row
    growth     passes by which the end of the row takes longer
    """

    slope: float
    low: float
    high: float
    at_half: float
    growth: float

    @property
    def travels(self) -> bool:
        """Whether settling is the arrival of a front. It must cost a pass over half a row to be seen: rows of T positions show fronts of
        2 / T passes a position and more."""
        return self.growth >= max(GROWTH, SHARE * self.at_half)


def find_front(positions: Sequence[int], settled: Sequence[Sequence[float | None]], passes: int, length: int) -> Front | None:
    """The front along rows of `length` positions. None where fewer than four positions of the second half are given.

    positions  counted from 0, ascending
    settled    one or more statistics over rows (median, 90th percentile …): the pass from which on each position stayed; None = not seen
    passes     that were looked at; what settled later counts as passes + 1
    """
    late = [i for i, t in enumerate(positions) if t >= length // 2]
    if len(late) < 4:
        return None

    def front(passes_P: Sequence[float | None]) -> Front:
        points = [(positions[i], min(passes + 1.0, math.inf if (k := passes_P[i]) is None else k)) for i in late]
        slope, at_half = _line(points, length // 2)
        quarters = [_line(points[: len(late) // 2], 0)[0], _line(points[len(late) // 2 :], 0)[0]]
        return Front(slope, min(quarters), max(quarters), at_half, slope * (length - length // 2))

    return max((front(passes_P) for passes_P in settled), key=lambda found: found.growth)


def _line(points: Sequence[tuple[int, float]], at: int) -> tuple[float, float]:
    """(slope, value at `at`) of the least-squares line."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return slope, mean_y + slope * (at - mean_x)


@torch.no_grad()
def measure_settling(
    model: FeedbackModel,
    tokens_BT: Tensor,
    passes: int,
    tolerance: float = 1e-2,
    layout: Layout = NOWHERE,
) -> Settling:
    """Runs `passes` (≥ 3) passes without gradients. Raises ValueError for fewer: a ratio needs two changes."""
    if passes < 3:
        raise ValueError(f"measuring a change ratio takes at least 3 passes, not {passes}")
    depth_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand(tokens_BT.shape)
    depth_BT = depth_BT if layout.positions_BT is None else layout.positions_BT
    if layout.documents_BT is not None:
        depth_BT = depth_BT.where(layout.documents_BT >= 0, -1)  # padding measures nothing
    if not bool((depth_BT >= 2 * passes - 1).any()):
        return Settling([], math.nan, math.nan, None, tolerance, measurable=False)
    ahead_BT = depth_BT >= passes
    readings = islice(iterate_passes(model, below(model, tokens_BT, layout)[0]), passes)
    previous = next(readings)
    changes = Changes(int(ahead_BT.sum()), passes - 1, rounding(previous.dtype), previous.device)
    settled_N = torch.ones(int(ahead_BT.sum()), dtype=torch.long, device=previous.device)
    medians, p99 = [], []
    for k, states in enumerate(readings, start=2):
        relative_N = (lengths(states - previous).float() / state_norms(states))[ahead_BT]
        changes.add(relative_N)
        settled_N = torch.where(relative_N < tolerance, settled_N, k)
        medians.append(quantile(relative_N, 0.5))
        p99.append(quantile(relative_N, 0.99))
        previous = states
    ratios_N = changes.ratios()
    front = find_front(*passes_by_position(settled_N, depth_BT[ahead_BT]), passes=passes, length=int(depth_BT.max()) + 1)
    needed = settled_from(p99, tolerance)
    return Settling(medians, quantile(ratios_N, 0.5), quantile(ratios_N, 0.99), needed, tolerance, measurable=True, front=front)


def passes_by_position(settled_N: Tensor, depth_N: Tensor, limit: int = 128) -> tuple[list[int], list[list[float]]]:
    """(positions, [medians, 90th percentiles] over rows) of the passes that N states at these depths took, at up to `limit` depths,
    evenly spread, of those there are."""
    present = depth_N.unique()
    if len(present) > limit:
        present = present[torch.linspace(0, len(present) - 1, limit, device=present.device).round().long()]
    by_position = [settled_N[depth_N == t].double() for t in present]
    return present.tolist(), [[math.ceil(quantile(passes_B, share)) for passes_B in by_position] for share in (0.5, 0.9)]


class Changes:
    """Relative changes ‖h^(k) - h^(k-1)‖ / ‖h^(k)‖ of N positions, pass by pass; a few numbers a position, however many passes.

    passes   changes that will be added; fewer if a pass returned the states it was given, after which nothing would change
    floor    change that is rounding
    """

    def __init__(self, positions: int, passes: int, floor: float, device: torch.device):
        self.floor, self.passes, self.quarter = floor, passes, max(1, passes // 4)
        self.seen = 0
        self.first_N, self.last_N, self.third_N, self.fourth_N = (torch.zeros(positions, device=device) for _ in range(4))
        self.first_at_N, self.last_at_N = (torch.zeros(positions, dtype=torch.long, device=device) for _ in range(2))

    def add(self, relative_N: Tensor) -> None:
        self.seen += 1
        above_N = ~(relative_N <= self.floor)  # so written, NaN is above
        begins_N = above_N & (self.first_at_N == 0)
        self.first_N = torch.where(begins_N, relative_N, self.first_N)
        self.first_at_N = torch.where(begins_N, self.seen, self.first_at_N)
        self.last_N = torch.where(above_N, relative_N, self.last_N)
        self.last_at_N = torch.where(above_N, self.seen, self.last_at_N)
        left = self.passes - self.seen
        if left < self.quarter:
            self.fourth_N = self.fourth_N + relative_N / self.quarter
        elif left < 2 * self.quarter:
            self.third_N = self.third_N + relative_N / self.quarter

    def ratios(self) -> Tensor:
        """Geometric mean factor [N] by which a change grew in a pass, from its first one above rounding to its last one; where it has
        stayed in rounding since, at most what it takes to get there. 0 where nothing moved the state, 1 where only the last pass did."""
        steps_N = self.last_at_N - self.first_at_N
        first_N = self.first_N.clamp(min=self.floor)
        grew_N = torch.where(steps_N > 0, (self.last_N / first_N) ** (1 / steps_N.clamp(min=1)), 1.0)
        settled_N = self.seen - self.last_at_N >= REST
        ratios_N = torch.where(settled_N, torch.minimum(grew_N, (self.floor / first_N) ** (1 / (steps_N + 1))), grew_N)
        return torch.where(self.first_at_N == 0, 0.0, ratios_N)

    def late_ratios(self) -> Tensor:
        """The factor a pass [N] at the end: from the mean change of the third quarter of the passes to that of the last. What a map does
        to begin with says little about what it comes to: a cycle is reached by changes that shrink, and then they no longer do. 0 where
        the last quarter is rounding."""
        ratios_N = (self.fourth_N / self.third_N.clamp(min=self.floor)) ** (1 / self.quarter)
        return torch.where(self.fourth_N <= self.floor, 0.0, ratios_N)

    def latest(self) -> Tensor:
        """Mean change [N] over the last quarter of the passes."""
        return self.fourth_N


def settled_from(p99: Sequence[float], tolerance: float) -> int | None:
    """The first pass k from which on the 99th percentile of relative change (of k = 2, 3, …) stayed below the tolerance, for at
    least REST passes. None if there is no such pass."""
    resting = 0
    for change in reversed(p99):
        if not change < tolerance:
            break
        resting += 1
    return len(p99) - resting + 2 if resting >= REST else None


def rounding(dtype: torch.dtype) -> float:
    """The relative change that is rounding in a dtype."""
    return max(FLOOR, 2 * torch.finfo(dtype).eps)


def state_norms(states_BTD: Tensor) -> Tensor:
    """‖h‖ [B, T], never 0: a relative change of nothing is nothing."""
    return lengths(states_BTD).float().clamp(min=torch.finfo(torch.float32).tiny)


def quantile(values_N: Tensor, share: float) -> float:
    """By sorting: torch.quantile refuses more than 2^24 values. NaN sorts last, so a single one shows at the top; NaN if there are none."""
    if not len(values_N):
        return math.nan
    ordered = values_N.double().sort().values
    place = share * (len(ordered) - 1)
    low = int(place)
    return float(ordered[low].lerp(ordered[min(low + 1, len(ordered) - 1)], place - low))
