"""Rollouts and grades as numbers: Pass@k, the choice of a temperature, lengths, and pairs of modes on the same problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from fullband.evaluate.generative.rollouts import RolloutSetting
from fullband.evaluate.journal import Journal
from fullband.evaluate.passk import Rollouts, choose_temperature, pass_at_k, pass_at_k_estimate
from fullband.evaluate.statistics import answer_lengths, mcnemar, paired_difference, wilson

TRACES = 3  # pairs of answers that a report shows


def summarize(settings: Sequence[RolloutSetting], numbers: Sequence[int], k: int, rollouts: Journal, grades: Journal) -> dict[str, Any]:
    """Of one benchmark and kind of prompts, as JSON: {"modes": {name: …}, "pairs": […], "traces": […]}.

    settings  of one task, in any number of modes and temperatures
    numbers   of the problems; each has been answered and graded in every setting
    """
    by_mode: dict[str, list[RolloutSetting]] = {}
    for setting in settings:
        by_mode.setdefault(setting.mode, []).append(setting)
    modes = {mode: _mode(own, numbers, k, rollouts, grades) for mode, own in by_mode.items()}
    chosen = {mode: next(one for one in own if one.temperature == modes[mode]["temperature"]) for mode, own in by_mode.items()}
    pairs = [_pair(chosen[one], chosen[other], numbers, k, grades) for one, other in combinations(by_mode, 2)]
    return {
        "k": k,
        "n": settings[0].n,
        "problems": len(numbers),
        "modes": modes,
        "pairs": pairs,
        "traces": _traces(chosen, numbers, rollouts, grades),
    }


def _mode(settings: Sequence[RolloutSetting], numbers: Sequence[int], k: int, rollouts: Journal, grades: Journal) -> dict[str, Any]:
    counts = {setting.temperature: [_count(grades[setting.key(number)]) for number in numbers] for setting in settings}
    fixed = {f"{temperature:g}": asdict(pass_at_k_estimate(own, k)) for temperature, own in counts.items()}
    choice = choose_temperature(counts, k) if len(counts) > 1 and len(numbers) > 1 else None
    best = choice.best if choice else settings[0].temperature
    setting = next(one for one in settings if one.temperature == best)
    texts = [rollout for number in numbers for rollout in rollouts[setting.key(number)]["rollouts"]]
    verdicts = [verdict for number in numbers for verdict in grades[setting.key(number)]["verdicts"]]
    right = verdicts.count("right")
    return {
        "feedback_passes": setting.feedback_passes,
        "temperature": best,
        "score": fixed[f"{best:g}"],
        "wilson": wilson(right, len(verdicts)) if setting.n == 1 else None,
        "fixed": fixed,
        "split_half": asdict(choice.split_half) if choice else None,
        "chosen": {f"{temperature:g}": share for temperature, share in choice.chosen.items()} if choice else None,
        "undecided": verdicts.count("undecided"),
        "cut_prompts": sum(rollouts[setting.key(number)]["cut"] > 0 for number in numbers),
        "lengths": asdict(answer_lengths([text["tokens"] for text in texts], [text["finish"] == "length" for text in texts])),
    }


def _count(grade: Mapping[str, Any]) -> Rollouts:
    return Rollouts(len(grade["verdicts"]), grade["verdicts"].count("right"))


def _pair(first: RolloutSetting, second: RolloutSetting, numbers: Sequence[int], k: int, grades: Journal) -> dict[str, Any]:
    """Difference of Pass@k, second minus first, over the same problems; McNemar on whether one of the first k rollouts is right."""
    scores = [[pass_at_k(_count(grades[setting.key(number)]), k) for number in numbers] for setting in (first, second)]
    solved = [["right" in grades[setting.key(number)]["verdicts"][:k] for number in numbers] for setting in (first, second)]
    return {
        "first": first.mode,
        "second": second.mode,
        "difference": asdict(paired_difference(scores[0], scores[1])),
        "mcnemar": asdict(mcnemar(solved[0], solved[1])),
    }


def _traces(chosen: Mapping[str, RolloutSetting], numbers: Sequence[int], rollouts: Journal, grades: Journal) -> list[dict[str, Any]]:
    """Fig. 8: problems whose answers differ most in length; those that all modes got right first, for a wrong answer may well be short."""
    if len(chosen) < 2:
        return []

    def rank(number: int) -> tuple[bool, int]:
        first = {mode: rollouts[setting.key(number)]["rollouts"][0] for mode, setting in chosen.items()}
        lengths = [rollout["tokens"] for rollout in first.values()]
        return all(grades[setting.key(number)]["verdicts"][0] == "right" for setting in chosen.values()), max(lengths) - min(lengths)

    shown = sorted(numbers, key=rank, reverse=True)[:TRACES]
    return [
        {
            "problem": number,
            "question": rollouts[next(iter(chosen.values())).key(number)].get("question", ""),  # older ones lack it
            "answers": {
                mode: rollouts[setting.key(number)]["rollouts"][0] | {"verdict": grades[setting.key(number)]["verdicts"][0]}
                for mode, setting in chosen.items()
            },
        }
        for number in shown
    ]
