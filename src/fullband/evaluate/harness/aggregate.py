"""Scores of documents as numbers: means with their errors, differences on the same documents, Fig. 4's aggregate over tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fullband.evaluate.statistics import Estimate, mcnemar, mean_estimate, mean_over_tasks, paired_difference, wilson

Scores = Mapping[str, float]  # of one document, by reading


def summarize_task(
    documents: Sequence[Mapping[str, Any]], metric: str, baseline: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Of one task, as JSON. `documents` and `baseline` are `DocumentScore.to_json()` of the same documents in the same order.

    readings     value and error of every metric; Wilson's interval where each document is right or wrong
    differences  of each reading to the plain one (the first, if that was not asked), and of this one to the baseline, paired by
                 document; McNemar where there is right and wrong
    chance       the metric's value for guessing, over the same documents; None where it is not known

    Raises ValueError if the baseline read other documents or prompts.
    """
    names = list(documents[0]["scores"])
    readings = {name: _reading([document["scores"][name] for document in documents], metric) for name in names}
    shown = {name: [document["scores"][name][metric] for document in documents] for name in names}
    found: dict[str, Any] = {"documents": len(documents), "metric": metric, "readings": readings}
    guesses = [document["chance"][metric] if "chance" in document else None for document in documents]
    found["chance"] = mean_chance(guesses)
    plain = "0" if "0" in names else names[0]
    found["differences"] = [_difference(plain, shown[plain], name, shown[name]) for name in names if name != plain]
    if baseline is not None:
        asked, answered = ([(one["task"], one["document"], one["prompt_hash"]) for one in own] for own in (documents, baseline))
        if asked != answered:
            raise ValueError(f"{documents[0]['task']}: the baseline read other documents or prompts; it can't be compared")
        [reading] = baseline[0]["scores"]
        own = [document["scores"][reading][metric] for document in baseline]
        found["baseline"] = _reading([document["scores"][reading] for document in baseline], metric)
        found["differences"].append(_difference("baseline", own, plain, shown[plain]))
    return found


def mean_chance(parts: Sequence[float | None]) -> float | None:
    """None if any is not known: a level over others would be of something else."""
    known = [part for part in parts if part is not None]
    return sum(known) / len(known) if known and len(known) == len(parts) else None


def _reading(scores: Sequence[Mapping[str, float]], metric: str) -> dict[str, Any]:
    estimates = {name: asdict(mean_estimate([score[name] for score in scores])) for name in scores[0]}
    values = [score[metric] for score in scores]
    return estimates[metric] | {
        "wilson": wilson(int(sum(values)), len(values)) if _binary(values) else None,
        "metrics": estimates,
    }


def _difference(first: str, one: Sequence[float], second: str, other: Sequence[float]) -> dict[str, Any]:
    binary = _binary(one) and _binary(other)
    test = asdict(mcnemar([value == 1 for value in one], [value == 1 for value in other])) if binary else None
    return {"first": first, "second": second, "difference": asdict(paired_difference(one, other)), "mcnemar": test}


def _binary(values: Sequence[float]) -> bool:
    return all(value in (0, 1) for value in values)


def mean_of_tasks(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fig. 4's aggregate over tasks that were read in the same ways: of each reading, of the baseline, and of each difference.

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
