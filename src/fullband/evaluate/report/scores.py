"""Scores as numbers. Of documents: means with their errors, differences on the same documents, Fig. 4's aggregate over tasks. Of rollouts
and grades: Pass@k, the choice of a temperature, lengths, pairs of modes on the same problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from fullband.evaluate.generative.rollouts import RolloutSetting
from fullband.evaluate.journal import Journal
from fullband.evaluate.statistics import (
    Estimate,
    Rollouts,
    answer_lengths,
    choose_temperature,
    mcnemar,
    mean_estimate,
    mean_over_tasks,
    paired_difference,
    pass_at_k,
    pass_at_k_estimate,
    wilson,
)

TRACES = 3  # pairs of answers that a report shows


def summarize_task(
    documents: Sequence[Mapping[str, Any]], metric: str, baseline: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Of one task, as JSON. `documents` and `baseline` are `DocumentScore.to_json()` of the same documents in the same order.

    readings     by feedback passes: value and error of every metric; Wilson's interval where each document is right or wrong
    differences  of each number of feedback passes to none (the first, if that was not asked), and of this one to the baseline, paired by
                 document; McNemar where there is right and wrong
    chance       the metric's value for guessing, over the same documents; None where it is not known

    Raises ValueError if the baseline was asked other documents or prompts.
    """
    names = list(documents[0]["scores"])
    by_name = {name: [document["scores"][name] for document in documents] for name in names}
    shown = {name: [scores[metric] for scores in own] for name, own in by_name.items()}
    plain = "0" if "0" in names else names[0]
    found: dict[str, Any] = {
        "documents": len(documents),
        "metric": metric,
        "readings": {name: _evaluated(own, metric) for name, own in by_name.items()},
        "chance": mean_chance([document["chance"][metric] if "chance" in document else None for document in documents]),
        "differences": [difference_of(plain, shown[plain], name, shown[name]) for name in names if name != plain],
    }
    if baseline is not None:
        asked, answered = ([(one["task"], one["document"], one["prompt_hash"]) for one in own] for own in (documents, baseline))
        if asked != answered:
            raise ValueError(f"{documents[0]['task']}: the baseline was asked other documents or prompts; it can't be compared")
        scores = [next(iter(document["scores"].values())) for document in baseline]
        found["baseline"] = _evaluated(scores, metric)
        found["differences"].append(difference_of("baseline", [score[metric] for score in scores], plain, shown[plain]))
    return found


def mean_chance(parts: Sequence[float | None]) -> float | None:
    """None if any is not known: a level over others would be of something else."""
    known = [part for part in parts if part is not None]
    return sum(known) / len(known) if known and len(known) == len(parts) else None


def _evaluated(scores: Sequence[Mapping[str, float]], metric: str) -> dict[str, Any]:
    estimates = {name: asdict(mean_estimate([score[name] for score in scores])) for name in scores[0]}
    values = [score[metric] for score in scores]
    return estimates[metric] | {
        "wilson": wilson(int(sum(values)), len(values)) if _binary(values) else None,
        "metrics": estimates,
    }


def difference_of(first: str, one: Sequence[float], second: str, other: Sequence[float]) -> dict[str, Any]:
    """The paired difference, second minus first; McNemar's test, too, where every score is 0 or 1."""
    right = [[value == 1 for value in values] for values in (one, other)] if _binary([*one, *other]) else None
    return _paired((first, second), (one, other), right)


def _paired(
    names: tuple[str, str], scores: tuple[Sequence[float], Sequence[float]], right: Sequence[Sequence[bool]] | None
) -> dict[str, Any]:
    """The difference of scores, second minus first, and McNemar's test on what was right."""
    test = asdict(mcnemar(*right)) if right else None
    return {"first": names[0], "second": names[1], "difference": asdict(paired_difference(*scores)), "mcnemar": test}


def _binary(values: Sequence[float]) -> bool:
    return all(value in (0, 1) for value in values)


def mean_of_tasks(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fig. 4's aggregate over tasks with the same numbers of feedback passes: of each number, of the baseline, and of each difference.

    The errors of differences are propagated from the paired ones, so they are smaller than those of two means.
    """
    names = list(tasks[0]["readings"])
    found: dict[str, Any] = {"readings": {name: _mean([task["readings"][name] for task in tasks]) for name in names}}
    found["chance"] = mean_chance([task.get("chance") for task in tasks])
    if all("baseline" in task for task in tasks):
        found["baseline"] = _mean([task["baseline"] for task in tasks])
    found["differences"] = [
        {"first": one["first"], "second": one["second"], "difference": _mean([task["differences"][place]["difference"] for task in tasks])}
        for place, one in enumerate(tasks[0]["differences"])
    ]
    return found


def _mean(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return asdict(mean_over_tasks([Estimate(part["value"], part["error"], part["count"]) for part in parts]))


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
    both = first, second
    scores = [[pass_at_k(_count(grades[setting.key(number)]), k) for number in numbers] for setting in both]
    solved = [["right" in grades[setting.key(number)]["verdicts"][:k] for number in numbers] for setting in both]
    return _paired((first.mode, second.mode), (scores[0], scores[1]), solved)


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
