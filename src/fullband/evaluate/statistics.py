"""How sure a number is: standard errors, intervals, paired tests, answer lengths, and Pass@k from n rollouts a problem (§4.2) with the
choice of a temperature for each mode. Closed forms in plain Python.

Choosing the temperature with the best score on the very problems that are reported, as §4.2 does, flatters. So three scores stand side by
side: that one, the score at each fixed temperature, and the split-half one, which chooses on half of the problems and reports on the
other half.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
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
    """Two evaluations of the same problems: how many only the one, or only the other, got right, and how likely so uneven a split is if
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


@dataclass(frozen=True)
class Rollouts:
    """Of one problem: rollouts drawn, and how many of them are right."""

    drawn: int
    right: int

    def __post_init__(self) -> None:
        if self.drawn < 1 or not 0 <= self.right <= self.drawn:
            raise ValueError(f"the number of correct samples must be 0 to n, with n at least 1, got {self.right} of {self.drawn}")


@dataclass(frozen=True)
class TemperatureChoice:
    """Scores of one mode.

    fixed       at each temperature
    best        the temperature with the best score on all problems (the lowest of equals): flattering
    split_half  chosen on one half of the problems, reported on the other, averaged over both ways and many splits
    chosen      share of those choices that fell on each temperature
    """

    fixed: dict[float, Estimate]
    best: float
    split_half: Estimate
    chosen: dict[float, float]


def pass_at_k(rollouts: Rollouts, k: int) -> float:
    """Unbiased estimate that one of k rollouts is right: 1 − C(n − c, k)/C(n, k). Raises ValueError unless 1 ≤ k ≤ n."""
    if not 1 <= k <= rollouts.drawn:
        raise ValueError(f"pass@k needs k of at least 1 and at least k samples, got k = {k} and {rollouts.drawn} samples")
    return 1 - math.comb(rollouts.drawn - rollouts.right, k) / math.comb(rollouts.drawn, k)


def pass_at_k_estimate(problems: Sequence[Rollouts], k: int) -> Estimate:
    """Mean over problems, with its standard error over problems: rollouts of one problem are no independent evidence about others."""
    return mean_estimate([pass_at_k(problem, k) for problem in problems])


def choose_temperature(rollouts: Mapping[float, Sequence[Rollouts]], k: int, *, splits: int = 200, seed: int = 0) -> TemperatureChoice:
    """All three scores of one mode. `rollouts` has, for each temperature, the same problems in the same order.

    The split-half error is the standard error over problems of what each contributed. It leaves out that problems share their choices of
    a temperature. Raises ValueError for fewer than 2 problems, no temperature, or lists of different lengths.
    """
    lengths = {len(problems) for problems in rollouts.values()}
    if len(lengths) != 1 or min(lengths) < 2:
        raise ValueError(f"choosing a temperature needs the same problems at each, at least 2, got {sorted(lengths) or 'none'}")
    if splits < 1:
        raise ValueError(f"the split-half choice needs at least 1 split, got {splits}")
    count = lengths.pop()
    scores = {temperature: [pass_at_k(problem, k) for problem in rollouts[temperature]] for temperature in sorted(rollouts)}
    chosen = dict.fromkeys(scores, 0)
    reported: list[list[float]] = [[] for _ in range(count)]
    draw = random.Random(f"split-half {seed}")
    for _ in range(splits):
        order = draw.sample(range(count), count)
        halves = order[: count // 2], order[count // 2 :]
        for choosing, reporting in (halves, halves[::-1]):
            temperature = _best(scores, choosing)
            chosen[temperature] += 1
            for problem in reporting:
                reported[problem].append(scores[temperature][problem])
    return TemperatureChoice(
        fixed={temperature: mean_estimate(values) for temperature, values in scores.items()},
        best=_best(scores, range(count)),
        split_half=mean_estimate([math.fsum(values) / len(values) for values in reported]),
        chosen={temperature: times / (2 * splits) for temperature, times in chosen.items()},
    )


def _best(scores: Mapping[float, Sequence[float]], problems: Sequence[int]) -> float:
    """The temperature with the highest score on these problems, the lowest of equals (`scores` goes from low to high)."""
    return max(scores, key=lambda temperature: math.fsum(scores[temperature][problem] for problem in problems))
