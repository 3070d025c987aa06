"""From jobs to claims: means over seeds with intervals, paired comparisons, compute spent. Nothing here has seen a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fullband.evaluate.statistics import Estimate, mean_estimate, paired_difference
from fullband.experiments.config import Experiment

ENOUGH = 3  # seeds that a claim needs
SPENT = ("steps", "tokens", "token_equivalent", "executed_positions", "executed_flops", "seconds", "processor_seconds", "measuring_seconds")
SECONDS = ("seconds", "processor_seconds")
MILESTONES = ("switch_on_shock", "crossover_step")
# 97.5% quantiles of Student's t for 1 … 30 degrees of freedom; beyond, the normal's.
STUDENT = [
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
]


def half_width(estimate: Estimate) -> float | None:
    """Half of the 95% interval of a mean (Student's t over seeds); None for a single value."""
    freedom = estimate.count - 1
    if freedom < 1:
        return None
    return estimate.error * (STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96)


def summarise(experiment: Experiment, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The contents of result.json.

    rows          by cell and evaluation: {column: {mean, half_width, by_seed}}; `half_width` is half of the 95% interval over seeds
    comparisons   of cells, paired by seed, with what they show; none in a smoke test
    smoke_test    true if any finished cell has fewer than three seeds: the table supports no claim
    unfinished    jobs of the grid that have no result, which nothing here speaks of
    """
    by_cell: dict[str, list[Mapping[str, Any]]] = {cell.name: [] for cell in experiment.cells}
    for result in sorted(results, key=lambda result: int(result["seed"])):
        by_cell[result["cell"]].append(result)
    finished = {name: found for name, found in by_cell.items() if found}
    smoke_test = any(len(found) < ENOUGH for found in finished.values())
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "measure": experiment.measure.model_dump(mode="json"),
        "smoke_test": smoke_test,
        "cells": [_cell(experiment, name, found) for name, found in finished.items()],
        "rows": [row for name, found in finished.items() for row in _rows(name, found)],
        "comparisons": [] if smoke_test else _comparisons(experiment, finished),
        "unfinished": [
            f"{cell.name}, seed {seed}"
            for cell in experiment.cells
            for seed in experiment.seeds
            if seed not in [result["seed"] for result in by_cell[cell.name]]
        ],
        "hardware": [*{str(result["hardware"]): result["hardware"] for result in results}.values()],
        "notes": list(experiment.notes),
    }


def _cell(experiment: Experiment, name: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A cell's seeds, and what it cost: means over seeds. Medians would hide a run that was disturbed."""
    cell = next(cell for cell in experiment.cells if cell.name == name)
    training = [result["training"] | {"measuring_seconds": result["measuring_seconds"]} for result in found]
    reached = {key: [run[key] for run in training] for key in MILESTONES}
    return {
        "cell": name,
        "about": cell.about,
        "set": cell.set,
        "equal": cell.equal.model_dump() if cell.equal else None,
        "seeds": [result["seed"] for result in found],
        "spent": {key: _spent(training, key) for key in SPENT},
        "resumed": any(run["resumed"] for run in training),
        "verdicts": [result["verdict"] for result in found],
        **reached,
    }


def _spent(training: Sequence[Mapping[str, Any]], key: str) -> float:
    """The mean over seeds; of seconds, which a resumed run counts from there on, over those that ran in one sitting if there are any."""
    whole = [run for run in training if not run["resumed"]] if key in SECONDS else []
    return math.fsum(run[key] for run in whole or training) / len(whole or training)


def _rows(cell: str, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "cell": cell,
            "reading": name,
            "n": len(found),
            "columns": {column: _mean([result["values"][name][column] for result in found]) for column in columns},
        }
        for name, columns in found[0]["values"].items()
    ]


def _mean(values: Sequence[float]) -> dict[str, Any]:
    estimate = mean_estimate(values)
    return {"mean": estimate.value, "half_width": half_width(estimate), "by_seed": list(values)}


def _comparisons(experiment: Experiment, finished: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    compared = []
    for asked in experiment.comparisons:
        ours, theirs = ({result["seed"]: result["values"] for result in finished.get(name, ())} for name in (asked.cell, asked.to))
        seeds = sorted(ours.keys() & theirs.keys())
        if len(seeds) < ENOUGH:
            continue  # a cell that has not been run, or other seeds
        for name, values in ((asked.reading, ours), (asked.to_reading, theirs)):
            if name not in values[seeds[0]]:
                raise ValueError(f"{experiment.name}: comparisons: no evaluation '{name}' (there are {', '.join(values[seeds[0]])})")
        columns = {}
        for column in ours[seeds[0]][asked.reading]:
            there = [theirs[seed][asked.to_reading][column] for seed in seeds]
            difference = paired_difference(there, [ours[seed][asked.reading][column] for seed in seeds])
            half = half_width(difference)
            assert half is not None
            columns[column] = {"mean": difference.value, "half_width": half, "shows": shows(difference.value, half)}
        compared.append(asked.model_dump() | {"n": len(seeds), "seeds": seeds, "columns": columns})
    return compared


def shows(difference: float, half: float) -> str:
    """What an interval of a difference supports."""
    return "higher" if difference - half > 0 else "lower" if difference + half < 0 else "no difference shown"
