"""Top states of whole sequences by feedback passes: as many depths of passes as are asked for, from one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor

from fullband.feedback.converged import MAX_PASSES, run_converged
from fullband.feedback.passes import FeedbackModel, Inputs, Pass, PassState, below, check_length, parallel, plain_pass, sequential
from fullband.feedback_config import FeedbackPasses
from fullband.layout import NOWHERE, Layout


def states_by_passes(
    model: FeedbackModel, given: Tensor, feedback_passes: Sequence[FeedbackPasses], layout: Layout = NOWHERE
) -> Iterator[tuple[FeedbackPasses, Tensor]]:
    """(feedback passes, top states [B, T, D]) of whole sequences, for each of `feedback_passes`: 0, 1, 2, … ascending, which are one run,
    as fewer passes are the first of more; then position by position ("exact", Eq. 8), or refined until they stop moving ("converged", to
    1e-3; `run_converged` has the options).

    layout   `plain_BT` is True where nothing is fed back: the prompts, in Soft
    Raises ValueError for other `feedback_passes`, for sequences longer than the context, and for "converged" with `plain_BT`.
    """
    for passes in feedback_passes:
        check_feedback_passes(passes)
    check_length(model, given.shape[1])
    if "converged" in feedback_passes and layout.plain_BT is not None:
        raise ValueError("feedback_passes 'converged' takes no prompts without feedback: use 0, 1, 2, … or 'exact'")
    inputs, _ = below(model, given, layout)
    wanted = {passes for passes in feedback_passes if isinstance(passes, int)}
    for passes, top_BTD in zip(range(max(wanted, default=-1) + 1), iterate_passes(model, inputs), strict=False):
        if passes in wanted:
            yield passes, top_BTD
    if "exact" in feedback_passes:
        head, state, rest = _without_feedback(model, inputs)
        _, output = sequential(model, rest, state)
        yield "exact", output.top_BTD if head is None else torch.cat([head, output.top_BTD], dim=1)
    if "converged" in feedback_passes:
        yield "converged", run_converged(model, inputs).top_BTD


def iterate_passes(model: FeedbackModel, inputs: Inputs) -> Iterator[Tensor]:
    """Top states [B, T, D] of pass 1 (without feedback), 2, 3, … without end, in constant memory. Slots before the first that any sequence
    feeds back are computed once."""
    head, state, rest = _without_feedback(model, inputs)
    first = plain_pass(model, rest, state.cache)
    plan = repeat(Pass(before_BWD=state.before_BWD, cache=state.cache))

    def whole(top_BTD: Tensor) -> Tensor:
        return top_BTD if head is None else torch.cat([head, top_BTD], dim=1)

    yield whole(first.top_BTD)
    for output in parallel(model, rest, first, plan):
        yield whole(output.top_BTD)


def top_states(model: FeedbackModel, given: Tensor, feedback_passes: FeedbackPasses = 0, layout: Layout = NOWHERE) -> Tensor:
    """Top states [B, T, D] of whole sequences after these feedback passes. Arguments and errors are those of `states_by_passes`."""
    for _, top_BTD in states_by_passes(model, given, [feedback_passes], layout):
        return top_BTD
    raise AssertionError("there is one number of passes")


def check_feedback_passes(feedback_passes: FeedbackPasses) -> None:
    """Raises ValueError unless it is 0, 1, 2, …, "exact" or "converged"."""
    is_count = isinstance(feedback_passes, int) and not isinstance(feedback_passes, bool) and feedback_passes >= 0
    if not is_count and feedback_passes not in ("exact", "converged"):
        raise ValueError(f"feedback_passes is 0, 1, 2, …, 'exact' or 'converged', not {feedback_passes!r}")


def positions_to_run(length: int, feedback_passes: Sequence[FeedbackPasses]) -> int:
    """Positions the trunk computes for `length` tokens in each of these ways; fewer passes are the first of more.

    What "converged" takes depends on the text; half of its limit is the guess.
    """
    deepest = max((passes for passes in feedback_passes if isinstance(passes, int)), default=-1)
    return length * (deepest + 1 + ("exact" in feedback_passes) + MAX_PASSES // 2 * ("converged" in feedback_passes))


def _without_feedback(model: FeedbackModel, inputs: Inputs) -> tuple[Tensor | None, PassState, Inputs]:
    """(top states of the first slots, which no sequence feeds back; the state after them; the other inputs). The last slot is left to the
    passes, as are all of a trunk that can't give a cache now."""
    plain_BT = inputs.layout.plain_BT
    if plain_BT is None or not model.trunk.supports_prefix_reuse:
        return None, PassState(), inputs
    length = min(int(plain_BT.all(dim=0).long().cumprod(dim=0).sum()), inputs.length - 1)
    if length == 0:
        return None, PassState(), inputs
    state, output = sequential(model, inputs[:length], feeds_back=False)
    return output.top_BTD, state, inputs[length:]
