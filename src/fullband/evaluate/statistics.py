"""How sure a number is: standard errors, intervals, paired tests, and summaries of answer lengths. Closed forms in plain Python."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_Score = TypeVar("_Score", bool, float)


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and the number of things it is the mean of. The error of a single thing is not known: NaN."""

    value: float
    error: float
    count: int


@dataclass(frozen=True)
class McNemar:
    """Two readings of the same problems: how many only the one, or only the other, got right, and how likely so uneven a split is if
    neither is better (two-sided, exact)."""

    only_first: int
    only_second: int
    p_value: float


@dataclass(frozen=True)
class Lengths:
    """Tokens to the answer (Fig. 6).

    median, quartiles  over the texts that reached their end; NaN if none did
    finished           how many did
    truncated          how many were cut at the limit: their length is only known to be more, so they are in no quantile
    """

    median: float
    lower_quartile: float
    upper_quartile: float
    finished: int
    truncated: int


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Mean of one score for each problem, with the standard error s/√n, where s² divides by n − 1. Raises ValueError without values."""
    if not values:
        raise ValueError("a mean needs at least one value")
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(statistics.fmean(values), error, len(values))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Mean of second − first over the same problems. Its error is smaller than that of two separate runs, where the scores go together.

    Raises ValueError unless both have the same number of problems, and one at least.
    """
    return mean_estimate([right - left for left, right in _pairs(first, second)])


def mean_over_tasks(tasks: Sequence[Estimate]) -> Estimate:
    """Fig. 4's aggregate: the mean of the tasks' scores, weighted alike, and its error √Σ error² / tasks (tasks are independent).

    `count` is the number of tasks. Raises ValueError without tasks.
    """
    if not tasks:
        raise ValueError("a mean over tasks needs at least one task")
    error = math.sqrt(math.fsum(task.error**2 for task in tasks)) / len(tasks)
    return Estimate(statistics.fmean(task.value for task in tasks), error, len(tasks))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Exact McNemar test on the same problems: of those that only one got right, either was as likely (binomial, p = ½).

    Raises ValueError unless both have the same number of problems, and one at least.
    """
    pairs = _pairs(first, second)
    only_first = sum(left and not right for left, right in pairs)
    only_second = sum(right and not left for left, right in pairs)
    uneven, fewer = only_first + only_second, min(only_first, only_second)
    term, tail = 1, 0  # integers: 2⁻ⁿ is 0 as a float for n > 1074
    for i in range(fewer + 1):
        tail += term
        term = term * (uneven - i) // (i + 1)
    return McNemar(only_first, only_second, min(1.0, 2 * tail / (1 << uneven)))


def wilson(successes: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a share. It stays within 0 and 1 and keeps its width at 0 of n.

    Raises ValueError for counts that are no share, or a confidence outside 0 to 1.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"a share must be 0 to n, with n at least 1, got {successes} of {count}")
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence must be above 0 and below 1, got {confidence}")
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = successes / count, z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    low = 0.0 if successes == 0 else centre - half  # exactly so: rounding may leave 1e-18
    high = 1.0 if successes == count else centre + half
    return low, high


def answer_lengths(tokens: Sequence[int], truncated: Sequence[bool]) -> Lengths:
    """Lengths of generated texts, those cut at the limit apart. Raises ValueError unless both have as many entries."""
    finished = [length for length, cut in zip(tokens, truncated, strict=True) if not cut]
    if len(finished) > 1:
        lower, median, upper = statistics.quantiles(finished, n=4, method="inclusive")
    else:
        lower = median = upper = float(finished[0]) if finished else math.nan
    return Lengths(median, lower, upper, len(finished), len(tokens) - len(finished))


def _pairs(first: Sequence[_Score], second: Sequence[_Score]) -> list[tuple[_Score, _Score]]:
    if len(first) != len(second) or not first:
        raise ValueError(f"a paired comparison needs the same problems twice, got {len(first)} and {len(second)}")
    return list(zip(first, second, strict=True))
