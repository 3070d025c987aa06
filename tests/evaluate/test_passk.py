"""Pass@k against counting all subsets; the three ways to choose a temperature."""

import itertools
import random

import pytest

from fullband.evaluate.statistics import Rollouts, choose_temperature, pass_at_k, pass_at_k_estimate


@pytest.mark.parametrize(
    ("drawn", "right", "k", "expected"),
    [
        (10, 0, 3, 0.0),
        (10, 10, 3, 1.0),
        (10, 1, 3, 0.3),
        (10, 3, 1, 0.3),
        (4, 2, 3, 1.0),  # any three of four hold a right one
        (5, 2, 2, 0.7),  # 3 of 10 pairs hold none
        (10, 8, 3, 1.0),
        (10, 2, 3, 1 - 56 / 120),
    ],
)
def test_by_hand(drawn, right, k, expected):
    assert pass_at_k(Rollouts(drawn, right), k) == pytest.approx(expected, abs=1e-15)


def test_by_counting_every_subset():
    for drawn in range(1, 8):
        for right in range(drawn + 1):
            for k in range(1, drawn + 1):
                subsets = list(itertools.combinations([True] * right + [False] * (drawn - right), k))
                assert pass_at_k(Rollouts(drawn, right), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_it_is_unbiased():
    """The mean over draws of n rollouts is the probability that one of k is right."""
    draw, chance, k = random.Random(1), 0.2, 3
    scores = [pass_at_k(Rollouts(10, sum(draw.random() < chance for _ in range(10))), k) for _ in range(20000)]
    assert sum(scores) / len(scores) == pytest.approx(1 - (1 - chance) ** k, abs=0.006)


def test_error_is_over_problems():
    estimate = pass_at_k_estimate([Rollouts(10, 0), Rollouts(10, 10), Rollouts(10, 1)], 3)
    assert estimate.value == pytest.approx(1.3 / 3) and estimate.count == 3
    assert estimate.error == pytest.approx(0.29627, abs=1e-5)


def chances(count: int, chance: float, seed: int) -> list[Rollouts]:
    draw = random.Random(seed)
    return [Rollouts(10, sum(draw.random() < chance for _ in range(10))) for _ in range(count)]


def test_best_on_test_flatters_and_split_half_does_not():
    """Three temperatures that are all the same: choosing the best of them looks better than they are."""
    truth = 1 - 0.9**1
    best, split = [], []
    for seed in range(60):
        choice = choose_temperature({t: chances(40, 0.1, 100 * seed + i) for i, t in enumerate((0.3, 0.5, 0.7))}, 1, splits=20)
        best.append(choice.fixed[choice.best].value)
        split.append(choice.split_half.value)
    assert sum(best) / 60 > truth + 0.008
    assert sum(split) / 60 == pytest.approx(truth, abs=0.004)


def test_a_clearly_better_temperature_is_chosen():
    choice = choose_temperature({0.7: chances(60, 0.5, 1), 0.3: chances(60, 0.05, 2)}, 3)
    assert choice.best == 0.7 and choice.chosen == {0.3: 0.0, 0.7: 1.0}
    assert choice.split_half.value == pytest.approx(choice.fixed[0.7].value) and choice.split_half.error == pytest.approx(
        choice.fixed[0.7].error
    )
    assert list(choice.fixed) == [0.3, 0.7]


def test_equals_go_to_the_lowest_and_splits_are_seeded():
    same = chances(11, 0.4, 3)
    assert choose_temperature({0.7: same, 0.3: same}, 1).best == 0.3
    mixed = {0.3: chances(11, 0.4, 4), 0.7: chances(11, 0.4, 5)}
    assert choose_temperature(mixed, 1, splits=3, seed=1) == choose_temperature(mixed, 1, splits=3, seed=1)
    assert choose_temperature(mixed, 1, splits=3, seed=1) != choose_temperature(mixed, 1, splits=3, seed=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k(Rollouts(2, 1), 3), "pass@k needs k of at least 1 and at least k samples, got k = 3 and 2 samples"),
        (lambda: pass_at_k(Rollouts(2, 1), 0), "k of at least 1"),
        (lambda: Rollouts(2, 3), "got 3 of 2"),
        (lambda: choose_temperature({}, 1), "none"),
        (lambda: choose_temperature({0.3: [Rollouts(1, 1)] * 2, 0.5: [Rollouts(1, 1)] * 3}, 1), r"\[2, 3\]"),
        (lambda: choose_temperature({0.3: [Rollouts(1, 1)] * 2}, 1, splits=0), "at least 1 split"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
