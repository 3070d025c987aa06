"""result.json: what the quickstart found, as plain data. The table, the pictures and the report are made from it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from fullband.config import Recipe
from fullband.costs import count_parameters, pass_flops
from fullband.data.tasks import build_task
from fullband.presets import resolve_trunk
from fullband.quickstart.accuracy import Readings
from fullband.quickstart.recipes import reach
from fullband.quickstart.training import Trained


def result_of(
    fullband: Recipe, standard: Recipe, trained: Mapping[str, Trained], readings: Readings, seconds: float, overrides: Sequence[str]
) -> dict[str, Any]:
    """The contents of result.json.

    seed, seconds, chance, token_equivalent_compute, accuracy   the quickstart's contract, see README
    stderr                 of `accuracy`, binomial over `rows` held-out rows
    accuracy_by_position   the same for every position 1 … 64
    training               of each model: steps, tokens, executed positions and FLOPs, seconds
    milestones             switch-on shock (nats) and crossover step of the full-bandwidth model
    """
    return {
        "seed": fullband.seed,
        "seconds": round(seconds, 1),
        "chance": readings.chance,
        "token_equivalent_compute": {name: run.token_equivalent for name, run in trained.items()},
        "accuracy": readings.at_positions("accuracy_T"),
        "stderr": readings.at_positions("stderr_T"),
        "rows": readings.rows,
        "accuracy_by_position": {name: reading.accuracy_T.tolist() for name, reading in readings.accuracy.items()},
        "example": readings.example,
        "training": {name: training_numbers(recipe, trained[name]) for name, recipe in (("standard", standard), ("fullband", fullband))},
        "milestones": milestones(trained["fullband"]),
        "task": task_facts(fullband),
        "trunk": resolve_trunk(fullband.model, vocab_size_of(fullband)).model_dump(),
        "overrides": list(overrides),
        "recipe": fullband.model_dump(mode="json"),
        "versions": {"python": platform.python_version()} | {package: version(package) for package in ("fullband", "torch", "numpy")},
        "hardware": {"machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count()},
    }


def training_numbers(recipe: Recipe, run: Trained) -> dict[str, Any]:
    """Steps, tokens, positions and FLOPs that were really executed, and seconds. FLOPs by formula, see `costs`."""
    trunk = resolve_trunk(recipe.model, vocab_size_of(recipe))
    plain, fused = (pass_flops(trunk, recipe.connection, recipe.data.length, fused=fused).training for fused in (False, True))
    numbers = asdict(run)
    wanted = ("steps", "tokens", "token_equivalent", "executed_positions")
    return {key: numbers[key] for key in wanted} | {
        "executed_flops": run.tokens * plain + (run.executed_positions - run.tokens) * fused,
        "seconds": round(run.seconds, 1),
        "parameters": count_parameters(trunk, recipe.connection).total,
    }


def milestones(run: Trained) -> dict[str, Any]:
    return {"switch_on_step": run.switch_on_step, "switch_on_shock": run.shock, "crossover_step": run.crossover_step}


def task_facts(recipe: Recipe) -> dict[str, Any]:
    """What a reader must know of the task; `reach` is how far back the plain model sees (None: all the way)."""
    source = recipe.data.source
    assert source.kind == "task"
    return {"task": source.task, "group": source.group, "length": recipe.data.length, "reach": reach(recipe)}


def vocab_size_of(recipe: Recipe) -> int:
    source = recipe.data.source
    assert source.kind == "task"
    return build_task(source).vocab_size
