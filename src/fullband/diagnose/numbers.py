"""What `trace_passes` found, as numbers: see trace.py for which positions are meant by early, final and past."""

from __future__ import annotations

from dataclasses import dataclass

from fullband.feedback.settling import Front


@dataclass(frozen=True)
class PassChange:
    """‖h^(k) - h^(k-1)‖ over a set of positions: means, and quantiles relative to ‖h^(k)‖."""

    absolute: float
    relative: float
    median: float
    p99: float


@dataclass(frozen=True)
class PassRecord:
    """Pass k of all rows. Losses in nats a target; None where there is no such position, or (`past`) the wavefront has come too close.

    moved      share of positions whose state is not bit for bit that of the pass before; None for pass 1
    change     over all positions; change_front  at the one position a row that pass k makes final; change_past  past the wavefront
    state_rms  root mean square of the elements of h^(k)
    gap_*      to exact evaluation: loss difference, ‖h^(k) - h‖ / ‖h‖ (mean), KL(exact ‖ pass k) in nats on a sample; past the wavefront
               while k <= horizon, over all positions in `gap_loss` and `gap_state`
    """

    k: int
    loss: float
    loss_early: float | None
    loss_behind: float | None
    loss_past: float | None
    moved: float | None
    change: PassChange | None
    change_front: PassChange | None
    change_past: PassChange | None
    state_rms: float
    gap_loss: float
    gap_state: float
    gap_state_past: float | None
    gap_kl_past: float | None


@dataclass(frozen=True)
class Return:
    """Does the state past the wavefront come back? `distance[p-1]` is the mean of ‖h^(k) - h^(k-p)‖ over that of ‖h^(k) - h^(k-1)‖,
    over the last LAGS passes up to the horizon. A cycle of period p has distance 0 there; a walk that never returns has 1 or more."""

    distance: list[float]

    @property
    def period(self) -> int | None:
        """The shortest period whose return is at most half as far as a step, if any (2, 3, …)."""
        close = [p for p, distance in enumerate(self.distance, start=1) if p > 1 and distance <= 0.5]
        return close[0] if close else None


@dataclass(frozen=True)
class Arrival:
    """When states come to stay within the tolerance of exact evaluation: where the map contracts, after the same few passes everywhere;
    where one step has to wait for another, later the further along the row.

    positions, median, p90   pass after which a position stayed there, over rows, at up to 128 positions; None = not in these passes
    late                     share of the positions of the second half of the rows that arrived
    passes_per_position      mean arrival in the last quarter of the rows minus that in the third, over their distance in positions. Where
                             most of the second half has not arrived within `horizon` passes, the first `horizon` positions are taken for
                             the row: these had to arrive
    front                how arrival within `horizon` passes moves along the second half of the rows; None for rows below eight positions
    """

    positions: list[int]
    median: list[int | None]
    p90: list[int | None]
    late: float
    passes_per_position: float
    front: Front | None = None


@dataclass(frozen=True)
class Trace:
    """Repeated passes over `rows` rows of up to `length` positions.

    horizon        passes over which positions past the wavefront were measured
    ratio_median   over those positions: the geometric mean factor by which the change grows in a pass (< 1: it shrinks), while it is
    ratio_p99      above rounding. NaN, as are the next two, where fewer than three passes were measured: a ratio takes two changes
    late_ratio     the median of that factor at the end: from the third quarter of the passes up to the horizon to the last one
    shrinking      share of those positions where the change still shrinks at the end (late ratio below 0.99) or is below `tolerance`
    passes_needed  {tolerance: first pass from which on the 99th percentile of relative change stayed below it up to the horizon, or None}
    unigram        cross-entropy of each target under the frequencies of the others: the loss of a model that knows them and sees no text
    fixed_at       the first pass that changed nothing, which ended the loop; None = all passes were run
    """

    rows: int
    length: int
    passes: int
    horizon: int
    records: list[PassRecord]
    ratio_median: float
    ratio_p99: float
    late_ratio: float
    shrinking: float
    passes_needed: dict[float, int | None]
    returns: Return
    arrival: Arrival
    loss_exact: float
    loss_exact_early: float | None
    loss_exact_past: float | None
    exact_rms: float
    unigram: float
    uniform: float
    fixed_at: int | None
    tolerance: float
