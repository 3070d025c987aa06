"""Warm-up, stable, cooldown: every corner."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullband.optim import in_cooldown, warmup_length, warmup_words, wsd_factor


def curve(steps: int, warmup: int, cooldown: float, shape: str = "linear") -> list[float]:
    return [wsd_factor(step, steps, warmup, cooldown, shape) for step in range(steps)]


def test_the_papers_shape() -> None:
    factors = curve(1000, 200, 0.25)
    assert factors[0] == 1 / 200 and factors[99] == 0.5 and factors[199] == 1
    assert set(factors[199:751]) == {1.0}
    assert factors[751] == 1 - 1 / 250 and factors[875] == 0.5 and factors[999] == pytest.approx(1 / 250)
    assert wsd_factor(1000, 1000, 200, 0.25) == 0
    assert [in_cooldown(step, 1000, 0.25) for step in (0, 749, 750, 999)] == [False, False, True, True]


def test_one_minus_sqrt() -> None:
    factors = curve(1000, 200, 0.25, "1-sqrt")
    assert factors[750] == 1 and factors[875] == pytest.approx(1 - math.sqrt(0.5)) and wsd_factor(1000, 1000, 200, 0.25, "1-sqrt") == 0
    assert all(a <= b for a, b in zip(factors[750:], curve(1000, 200, 0.25)[750:], strict=True))


def test_warmup_is_cut_to_a_third_of_the_run() -> None:
    assert curve(90, 200, 0.0)[:31] == [*((i + 1) / 30 for i in range(30)), 1.0]
    assert curve(600, 200, 0.0)[198] == 199 / 200  # 200 is a third: not cut
    assert curve(2, 200, 0.0) == [1.0, 1.0]
    assert curve(1, 200, 0.25) == [1.0]


def test_a_cut_warmup_is_said() -> None:
    assert warmup_words(90, 200) == "the learning rates warm up over 30 steps, a third of the run, not optim.warmup_steps=200"
    assert warmup_words(600, 200) == "the learning rates warm up over 200 steps"
    assert warmup_words(3, 1) == "the learning rates warm up over 1 step" and warmup_length(2, 200) == 0


def test_no_warmup_no_cooldown() -> None:
    assert curve(50, 0, 0.0) == [1.0] * 50
    assert wsd_factor(50, 50, 0, 0.0) == 1.0 and not in_cooldown(50, 50, 0.0)


def test_cooldown_over_the_whole_run_overlaps_the_warmup() -> None:
    factors = curve(90, 30, 1.0)
    assert factors[0] == 1 / 30 and factors[29] == 1 - 29 / 90 and factors[89] == pytest.approx(1 / 90)
    assert in_cooldown(0, 90, 1.0)


@given(st.integers(1, 400), st.integers(0, 300), st.floats(0, 1), st.sampled_from(["linear", "1-sqrt"]))
def test_stays_in_range_and_has_one_peak(steps: int, warmup: int, cooldown: float, shape: str) -> None:
    factors = curve(steps, warmup, cooldown, shape)
    assert all(0 < factor <= 1 for factor in factors)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1]) and factors[peak:] == sorted(factors[peak:], reverse=True)


@pytest.mark.parametrize("wrong", [(-1, 10, 0, 0.5), (0, 0, 0, 0.5), (0, 10, -1, 0.5), (0, 10, 0, 1.5), (0, 10, 0, math.nan)])
def test_impossible_schedules_are_refused(wrong: tuple[int, int, int, float]) -> None:
    with pytest.raises(ValueError, match="schedule"):
        wsd_factor(*wrong)
    with pytest.raises(ValueError, match="cosine"):
        wsd_factor(0, 10, 0, 0.5, "cosine")
