"""A front or a contraction: by how the passes that positions take to settle grow along the row."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from fullband.feedback.settling import Front, find_front


def front(settled: Callable[[int], float], length: int = 128, passes: int = 64) -> Front:
    """Of rows whose position t settles after `settled(t)` passes, and no later than it must."""
    taken = [float(math.ceil(min(t + 1, settled(t)))) for t in range(length)]
    found = find_front(range(length), [taken], passes, length)
    assert found is not None
    return found


@pytest.mark.parametrize("needed", [1, 6, 20, 50])
def test_settling_that_is_flat_after_the_first_positions_is_none(needed: int) -> None:
    found = front(lambda t: needed)
    assert not found.travels and found.slope == pytest.approx(0, abs=1e-9) and found.at_half == needed


@pytest.mark.parametrize("slope", [0.05, 0.1, 1 / 3, 0.75])
@pytest.mark.parametrize("passes", [64, 1000])
def test_a_front_of_any_speed_is_one(slope: float, passes: int) -> None:
    found = front(lambda t: 3 + slope * t, passes=max(passes, int(slope * 140)))
    assert found.travels and found.slope == pytest.approx(slope, rel=0.15)


def test_a_front_whose_speed_changes() -> None:
    assert front(lambda t: 0.1 * t if t < 90 else 9 + 0.4 * (t - 90)).travels
    slowing = front(lambda t: 0.6 * t if t < 96 else 57.6 + 0.05 * (t - 96), passes=80)
    assert slowing.travels and slowing.low < 0.1 < 0.5 < slowing.high


def test_a_front_that_has_crossed_part_of_the_rows_when_passes_end() -> None:
    assert front(lambda t: 0.5 * t, passes=48).travels, "what is beyond counts as one pass more than were run"
    assert not front(lambda t: 0.95 * t, passes=16).travels, "nothing of the second half was seen to settle: other rules decide"


def test_noise_along_the_row_is_none() -> None:
    draw = random.Random(0)
    for _ in range(20):
        assert not front(lambda t: 20 + draw.choice([-3, -1, 0, 0, 1, 3])).travels
        assert not front(lambda t: 6 + (draw.random() < 0.1)).travels


def test_the_slowest_front_that_rows_show() -> None:
    """It must cost a pass over half a row; longer rows show it."""
    assert not front(lambda t: 3 + 0.005 * t).travels
    assert front(lambda t: 3 + 0.005 * t, length=1024).travels


def test_the_rows_that_settle_last_decide() -> None:
    """A front in some rows only is seen at the 90th percentile."""
    flat, late = [5.0] * 64, [5.0 + 0.3 * t for t in range(64)]
    both = find_front(range(64), [flat, late], 32, 64)
    assert both is not None and both.travels
    assert find_front(range(6), [flat[:6]], 32, 6) is None
