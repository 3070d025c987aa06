"""Standard errors, paired tests and intervals against scipy and cases counted by hand."""

import math

import pytest

from fullband.evaluate.statistics import Estimate, answer_lengths, mcnemar, mean_estimate, mean_over_tasks, paired_difference, wilson


def test_mean_and_its_error_by_hand():
    estimate = mean_estimate([1, 0, 1, 1])
    assert estimate.value == 0.75 and estimate.count == 4
    assert estimate.error == pytest.approx(math.sqrt(3 * 0.25**2 + 0.75**2) / math.sqrt(3) / 2)
    assert math.isnan(mean_estimate([0.3]).error)


def test_error_of_a_mean_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    values = [0.1, 0.9, 0.4, 0.35, 0.8, 0.0, 1.0]
    assert mean_estimate(values).error == pytest.approx(stats.sem(values), abs=1e-15)


def test_error_of_a_mean_covers_what_it_should():
    """Of many samples, the share within 1.96 standard errors of the truth is near 95%."""
    import random

    draw = random.Random(0)
    inside = 0
    for _ in range(2000):
        estimate = mean_estimate([float(draw.random() < 0.3) for _ in range(200)])
        inside += abs(estimate.value - 0.3) < 1.96 * estimate.error
    assert 0.93 < inside / 2000 < 0.965


def test_pairs_that_go_together_differ_surely():
    first = [0.1, 0.5, 0.9, 0.2]
    difference = paired_difference(first, [value + 0.05 for value in first])
    assert difference.value == pytest.approx(0.05) and difference.error == pytest.approx(0, abs=1e-12)
    assert paired_difference([0.0, 1.0], [1.0, 1.0]).value == 0.5  # second minus first


def test_mean_over_tasks_propagates_errors():
    mean = mean_over_tasks([Estimate(0.5, 0.03, 100), Estimate(0.7, 0.04, 50)])
    assert mean == Estimate(pytest.approx(0.6), pytest.approx(0.025), 2)


def test_mcnemar_by_hand():
    """Five problems only the second got right, one only the first: 2 · (C(6,0) + C(6,1)) / 2⁶ = 14/64."""
    first = [True] * 3 + [False] * 5 + [True] + [False] * 2
    second = [True] * 3 + [True] * 5 + [False] + [False] * 2
    result = mcnemar(first, second)
    assert (result.only_first, result.only_second) == (1, 5)
    assert result.p_value == 14 / 64


def test_mcnemar_is_symmetric_and_1_where_nothing_differs():
    assert mcnemar([True, False], [True, False]).p_value == 1
    assert mcnemar([True, False], [False, True]).p_value == 1
    assert mcnemar([True] * 9, [False] * 9).p_value == mcnemar([False] * 9, [True] * 9).p_value == 2 / 2**9


@pytest.mark.parametrize(("ones", "others"), [(0, 1), (3, 11), (40, 62), (700, 820), (1000, 2500)])
def test_mcnemar_is_scipys_binomial_test(ones, others):
    stats = pytest.importorskip("scipy.stats")
    result = mcnemar([True] * ones + [False] * others, [False] * ones + [True] * others)
    assert result.p_value == pytest.approx(stats.binomtest(ones, ones + others).pvalue, rel=1e-9)


@pytest.mark.parametrize(("successes", "count"), [(0, 10), (10, 10), (3, 7), (81, 263), (1, 1)])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_wilson_is_scipys(successes, count, confidence):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(successes, count).proportion_ci(confidence, method="wilson")
    assert wilson(successes, count, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_known_case():
    """Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_truncated_texts_are_apart():
    lengths = answer_lengths([10, 20, 30, 512, 512], [False, False, False, True, True])
    assert (lengths.median, lengths.finished, lengths.truncated) == (20, 3, 2)
    assert (lengths.lower_quartile, lengths.upper_quartile) == (15, 25)
    assert answer_lengths([7, 9], [False, True]).median == 7
    none = answer_lengths([512], [True])
    assert math.isnan(none.median) and (none.finished, none.truncated) == (0, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_estimate([]), "at least one value"),
        (lambda: mean_over_tasks([]), "at least one task"),
        (lambda: mcnemar([True], [True, False]), "same problems twice, got 1 and 2"),
        (lambda: paired_difference([], []), "same problems twice"),
        (lambda: wilson(3, 2), "got 3 of 2"),
        (lambda: wilson(0, 0), "got 0 of 0"),
        (lambda: wilson(1, 2, 95), "confidence"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
