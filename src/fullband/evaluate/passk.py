"""Pass@k from n rollouts a problem (§4.2), and the choice of a temperature for each mode.

Choosing the temperature with the best score on the very problems that are reported, as §4.2 does, flatters. So three readings stand side
by side: that one, the score at each fixed temperature, and the split-half one, which chooses on half of the problems and reports on the
other half.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fullband.evaluate.statistics import Estimate, mean_estimate


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
    """All three readings of one mode. `rollouts` has, for each temperature, the same problems in the same order.

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
