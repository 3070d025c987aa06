"""A schedule's phases in steps: one rule for the run that draws its passes, and for what counts its cost without running it."""

from __future__ import annotations

from collections.abc import Sequence

from fullband.feedback_config import Phase

Span = tuple[int, int, dict[int, float]]  # first step, step after the last, number of passes -> probability


def schedule_spans(phases: Sequence[Phase], steps: int, start_step: int = 0) -> list[Span]:
    """The phases of a run of `steps`, plain before `start_step`; those that are shorter than a step are left out."""
    spans: list[Span] = []
    done, first = 0.0, 0
    for number, phase in enumerate(phases, start=1):
        done += phase.fraction * steps
        stop = steps if number == len(phases) else min(round(done), steps)
        switch = min(max(first, start_step), stop)
        spans += [(first, switch, {1: 1.0}), (switch, stop, phase.passes)]
        first = stop
    return [span for span in spans if span[0] < span[1]]
