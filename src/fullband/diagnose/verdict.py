"""The verdict in words, and the numbers it rests on. A function of a trace and nothing else, so that each rule can be tested.

What would mislead, and is not asked: the mean change over whole rows (positions within the wavefront are final whatever the model), the
change ratio of rows that a fast wavefront has crossed meanwhile (hence `Front`: later positions must not settle later), and the norm of the
Jacobian (good models have top singular values well above 1). That not every single change shrinks from one pass to the next says little,
too: where a map contracts slowly, that of a position is uneven, so in few passes its spread over positions tells more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fullband.diagnose.numbers import PassRecord, Trace
from fullband.diagnose.trace import SHRINKS
from fullband.feedback.settling import FLOOR, GROWTH, SHARE, Front

VerdictWord = Literal[
    "contracting", "wavefront-limited", "oscillating", "diverging", "not yet trained", "not measurable at this length"
]  # fmt: skip

LEARNED = 0.95  # an evaluation shows something learned if its loss is below this share of what the targets' frequencies alone give
CLIMB = 0.05  # of that loss: what counts as a loss that has risen
LEAST_PASSES = 8  # past the wavefront, before anything is said about settling
SETTLED = 0.95  # share of positions past the wavefront whose change must shrink to the end
FALLS = 0.9  # of what it was in the third quarter of the passes, the change over positions in the last: below, it shrinks
SLOW = 0.05  # passes a position: arrivals that rise faster than one pass in twenty positions wait for one another
UNSETTLED_SLOPE = 0.9  # passes a position: at 1 nothing settles before it must
GROWN = 2.0  # times the change and the state's scale must have grown to call it a flight
WORSE = 0.01  # nats: what is said of a loss that repeated passes have left above that of one
SPEAK_OF_LOSS = ("contracting", "wavefront-limited", "oscillating", "diverging")  # where enough was measured, and something learned
TRAINED_PASSES = 3  # the deepest that the paper trains; what deeper passes must beat to be worth their cost


@dataclass(frozen=True)
class Verdict:
    """A word, and the sentences that say why, the deciding one first; `headline` is the word and, if repeated passes left the loss
    worse than one pass had it, that."""

    word: VerdictWord
    why: list[str]
    worse: str | None = None

    @property
    def headline(self) -> str:
        return self.word if self.worse is None else f"{self.word}, and {self.worse}"


def judge(trace: Trace) -> Verdict:
    """The verdict on what repeated passes did."""
    rules = (_not_finite, _not_trained, _not_measurable, _running_away, _contracting, _cycling, _waiting)
    found = next((verdict for rule in rules if (verdict := rule(trace)) is not None), None) or _unsettled(trace)
    return Verdict(found.word, [*found.why, *_stopped(trace)], _worse(trace) if found.word in SPEAK_OF_LOSS else None)


def _worse(trace: Trace) -> str | None:
    plain, last = _past(trace)[0], _last(trace)
    if plain.loss_past is None or last.loss_past is None or not last.loss_past > plain.loss_past + WORSE:
        return None
    return (
        f"{last.k} passes have a higher loss than one: {last.loss_past:.3f} nats past the wavefront, {plain.loss_past:.3f} without feedback"
    )


def reference_loss(trace: Trace) -> float:
    """The loss, in nats, of knowing the targets' frequencies and no text."""
    return min(trace.unigram, trace.uniform)


def _not_finite(trace: Trace) -> Verdict | None:
    for record in trace.records:
        if not (math.isfinite(record.loss) and math.isfinite(record.state_rms)):
            return Verdict("diverging", [f"States or loss are no longer finite at pass {record.k}."])
    if not (math.isfinite(trace.loss_exact) and math.isfinite(trace.exact_rms)):
        return Verdict("diverging", [f"States or loss of exact evaluation are not finite within {trace.length} positions."])
    return None


def _not_trained(trace: Trace) -> Verdict | None:
    """Whole rows or their first quarter will do: a model that goes on beyond its training length may be lost later."""
    reference, fused = reference_loss(trace), trace.records[1:]
    plain = _least(trace.records[0].loss, trace.records[0].loss_early)
    best_fused = _least(trace.loss_exact, trace.loss_exact_early, *(loss for r in fused for loss in (r.loss, r.loss_early)))
    bound = f"{LEARNED:g} of the {reference:.3f} nats of a unigram model"
    if min(plain, best_fused) >= LEARNED * reference:
        return Verdict(
            "not yet trained",
            [f"No evaluation has a loss below {bound}: {plain:.3f} without feedback, {best_fused:.3f} at best with it."],
        )
    if fused[0].moved == 0:
        return Verdict("not yet trained", ["The fusion has no effect: the second pass changes no state (is its state matrix still zero?)."])
    if best_fused >= LEARNED * reference:
        words = f"Without feedback the model has learned ({plain:.3f} nats), but its fusion has not: with feedback no loss is below {bound}"
        return Verdict("not yet trained", [f"{words} ({best_fused:.3f} at best)."])
    return None


def _least(*losses: float | None) -> float:
    return min(loss for loss in losses if loss is not None)


def _not_measurable(trace: Trace) -> Verdict | None:
    if trace.horizon >= LEAST_PASSES:
        return None
    why = (
        f"Only {trace.passes} passes were run; at least {LEAST_PASSES} are needed."
        if trace.passes < LEAST_PASSES
        else f"Sequences of {trace.length} positions show {trace.horizon} passes past the wavefront; "
        f"{LEAST_PASSES} passes need sequences of {2 * LEAST_PASSES}."
    )
    return Verdict("not measurable at this length", [why])


def _running_away(trace: Trace) -> Verdict | None:
    first, last = _first(trace), _last(trace)
    assert first.change_past is not None and last.change_past is not None
    change = last.change_past.absolute / max(first.change_past.absolute, 1e-30)
    scale = last.state_rms / trace.records[0].state_rms
    if trace.ratio_median <= 1 or change < GROWN or scale < GROWN:
        return None
    return Verdict(
        "diverging",
        [
            f"Past the wavefront the change grows: median ratio {trace.ratio_median:.3f} a pass, x {change:.3g} from pass {first.k} to "
            f"{last.k}, while states grow x {scale:.3g}."
        ],
    )


def _contracting(trace: Trace) -> Verdict | None:
    """The change shrinks to the end: at nearly every position, or in the median and the 99th percentile over positions; and it does so
    everywhere at once, not where a front has passed."""
    if _travels(trace):
        return None
    needed = trace.passes_needed[trace.tolerance]
    whole = trace.ratio_p99 < SHRINKS and _falls_to(trace, "median") < FALLS and _falls_to(trace, "p99") < FALLS
    if needed is None and trace.shrinking < SETTLED and not whole:
        return None
    why = [
        f"At {trace.shrinking:.1%} of the positions past the wavefront the change shrinks to the end, or has come below "
        f"{trace.tolerance:g}: ratio {trace.ratio_median:.3f} a pass in the median, {trace.ratio_p99:.3f} at the 99th percentile."
    ]
    if needed is None and trace.shrinking < SETTLED:
        why = ["Past the wavefront the change shrinks, if not evenly.", _at_the_end(trace)]
    last = _last(trace)
    assert last.change_past is not None
    why.append(
        f"99% of the states move less than {trace.tolerance:g} of themselves from pass {needed} on."
        if needed is not None
        else f"It has not come below {trace.tolerance:g} everywhere in {last.k} passes (99th percentile {last.change_past.p99:.2g})."
    )
    best = min(_past(trace), key=lambda record: _loss_past(record))
    if _loss_past(last) > _loss_past(best) + CLIMB * reference_loss(trace):
        why.append(
            f"But what it settles to has a higher loss: "
            f"{_loss_past(last):.3f} nats at pass {last.k}, {_loss_past(best):.3f} at pass {best.k}."
        )
    front = trace.arrival.front
    if front is not None:
        why.append(f"{_along_the_row(front)}: every position settles alike.")
    return Verdict("contracting", why)


def _cycling(trace: Trace) -> Verdict | None:
    period = trace.returns.period
    if period is None:
        return None
    last = _last(trace)
    assert last.change_past is not None
    return Verdict(
        "oscillating",
        [
            f"Past the wavefront states return after {period} passes: to within {trace.returns.distance[period - 1]:.2g} of the step that "
            f"they make in one, which is {last.change_past.relative:.2g} of the state at pass {last.k}.",
            _at_the_end(trace),
            *_deep_loss(trace),
        ],
    )


def _travels(trace: Trace) -> bool:
    return trace.arrival.front is not None and trace.arrival.front.travels


def _along_the_row(front: Front) -> str:
    return (
        f"From the middle of the sequences to their end, passes to settle go from {front.at_half:.1f} by {front.growth:+.1f} "
        f"({front.slope:.3f} a position; {front.low:.3f} to {front.high:.3f} by quarter)"
    )


def _arrives_in_turn(trace: Trace) -> bool:
    """Later positions settle later, yet before they must: a front of its own passes along the row, if not yet along all of it."""
    return _travels(trace) or SLOW < trace.arrival.passes_per_position < UNSETTLED_SLOPE


def _waiting(trace: Trace) -> Verdict | None:
    """A front that settles states ahead of the one that no model can escape (one pass a position), or one that is worth waiting for."""
    shallow = min(_loss_past(record) for record in _past(trace)[:TRAINED_PASSES])
    pays = trace.loss_exact_past is not None and trace.loss_exact_past < LEARNED * shallow
    slope = trace.arrival.passes_per_position
    if not pays and not _arrives_in_turn(trace):
        return None
    why = [
        f"States become exact one position after another: {slope:.2g} passes per position."
        if slope > SLOW or _travels(trace)
        else f"{trace.arrival.late:.0%} of the second half of the sequences became exact in {trace.records[-1].k} passes."
    ]
    if trace.arrival.front is not None and trace.arrival.front.travels:
        least = max(GROWTH, SHARE * trace.arrival.front.at_half)
        why.append(f"{_along_the_row(trace.arrival.front)}: a front, not contraction ({least:.1f} or more).")
    exact = math.nan if trace.loss_exact_past is None else trace.loss_exact_past
    worth = "Waiting is worth it" if pays else "Waiting gains nothing here (are the sequences longer than the model can follow?)"
    why.append(
        f"{worth}: past the wavefront exact evaluation has {exact:.3f} nats, the first {TRAINED_PASSES} passes {shallow:.3f} at best."
    )
    return Verdict("wavefront-limited", [*why, _at_the_end(trace)])


def _unsettled(trace: Trace) -> Verdict:
    """The change neither shrinks everywhere nor runs away nor returns, and nothing is gained by waiting. A loss that still climbs at the
    end says that it leads away. Where the median is on its way down and only the largest changes are not yet, that is no oscillation: more
    passes will say what it comes to."""
    last = _last(trace)
    assert last.change_past is not None
    numbers = [_at_the_end(trace), *_deep_loss(trace)]
    before, after = _last_quarters([_loss_past(record) for record in _past(trace)])
    climbing = after > before + CLIMB * reference_loss(trace)
    if not climbing and trace.tolerance <= last.change_past.median and _falls_to(trace, "median") < FALLS:
        early = (
            f"{last.k} passes do not say whether all states settle; most are about to. Run more, over sequences of twice as many positions."
        )
        return Verdict("not measurable at this length", [early, *numbers])
    moving = f"Past the wavefront the change does not settle: {last.change_past.relative:.2g} of the state at pass {last.k}."
    return Verdict("diverging" if climbing else "oscillating", [moving, *numbers])


def _at_the_end(trace: Trace) -> str:
    """Whether the change shrinks, and from where on it would count as contracting."""
    median, p99 = _falls_to(trace, "median"), _falls_to(trace, "p99")
    return (
        f"The change has a ratio of {trace.ratio_median:.3f} a pass in the median, {trace.ratio_p99:.3f} at the 99th percentile; in the "
        f"last quarter of the passes it is x {median:.2f} that of the third in the median, x {p99:.2f} at the 99th percentile; it shrinks "
        f"to the end at {trace.shrinking:.1%} of the positions. (Contracting: at {SETTLED:.0%}; or both below {FALLS:g}, with 99% of the "
        f"ratios below {SHRINKS:g}.)"
    )


def _falls_to(trace: Trace, over_positions: Literal["median", "p99"]) -> float:
    """The change past the wavefront in the last quarter of the passes over that in the quarter before."""
    changes = [record.change_past for record in _past(trace) if record.change_past is not None]
    before, after = _last_quarters([change.median if over_positions == "median" else change.p99 for change in changes])
    return after / max(before, FLOOR)


def _last_quarters(values: Sequence[float]) -> tuple[float, float]:
    """Means of the third quarter and of the last."""
    quarter = max(1, len(values) // 4)
    return sum(values[-2 * quarter : -quarter]) / quarter, sum(values[-quarter:]) / quarter


def _deep_loss(trace: Trace) -> list[str]:
    last = _last(trace)
    best = min(_past(trace), key=lambda record: _loss_past(record))
    exact = "" if trace.loss_exact_past is None else f", {trace.loss_exact_past:.3f} under exact evaluation"
    return [f"Loss there: {_loss_past(best):.3f} nats at best (pass {best.k}), {_loss_past(last):.3f} at pass {last.k}{exact}."]


def _stopped(trace: Trace) -> list[str]:
    if trace.fixed_at is None:
        return []
    left = trace.passes - trace.fixed_at
    return [f"Pass {trace.fixed_at} returned the states it was given, bit for bit; the other {left} would too, and were not run."]


def _past(trace: Trace) -> list[PassRecord]:
    """Records of the passes that were measured past the wavefront."""
    return [record for record in trace.records if record.k <= trace.horizon]


def _first(trace: Trace) -> PassRecord:
    return trace.records[1]


def _last(trace: Trace) -> PassRecord:
    return _past(trace)[-1]


def _loss_past(record: PassRecord) -> float:
    """Infinite where nothing there has a target."""
    return math.inf if record.loss_past is None else record.loss_past
