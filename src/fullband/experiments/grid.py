"""The jobs of an experiment: every cell with every seed, as recipes ready to train; and what can be known to go wrong with them before
hours of training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullband.config import Recipe, TaskSource, parse, set_key
from fullband.costs import RunCost, pass_mixture, run_cost
from fullband.experiments.config import Cell, EqualTo, Experiment, PositionsMeasure, ProbeMeasure
from fullband.experiments.measure import evaluations_of
from fullband.training.resolve import shape_of

RUNS = Path("runs") / "experiments"
AMOUNTS = {"tokens": "tokens", "token-equivalent": "token_equivalent", "flops": "flops"}  # of `RunCost`


@dataclass(frozen=True)
class Job:
    """One cell with one seed: what is trained, where, and what it is expected to cost."""

    cell: Cell
    seed: int
    recipe: Recipe
    cost: RunCost

    @property
    def name(self) -> str:
        return f"{self.cell.name}-seed-{self.seed}"

    @property
    def folder(self) -> Path:
        assert self.recipe.output is not None
        return Path(self.recipe.output)


def jobs_of(experiment: Experiment, seeds: Sequence[int] | None = None, runs: Path = RUNS) -> list[Job]:
    """All cells with the first seed, then all with the second …: a grid that is cut short has fewer seeds, not fewer cells.

    Raises ValueError, naming the cell, for a recipe that does not fit.
    """
    jobs = []
    for seed in seeds or experiment.seeds:
        recipes = {cell.name: _recipe(experiment, cell, seed, runs) for cell in experiment.cells}
        for cell in experiment.cells:
            if cell.equal:
                recipes[cell.name] = _with_equal_compute(recipes[cell.name], recipes[cell.equal.cell], cell.equal)
        jobs += [Job(cell, seed, recipes[cell.name], expected_cost(recipes[cell.name])) for cell in experiment.cells]
    return jobs


def expected_cost(recipe: Recipe) -> RunCost:
    """The expected compute of a run of an App. A model, by formula."""
    trunk = shape_of(recipe)
    mixture = pass_mixture(recipe.feedback.phases, recipe.train.steps, recipe.feedback.start_step)
    tokens = recipe.train.steps * recipe.train.batch_rows * recipe.data.length
    rows = recipe.train.microbatch_rows or recipe.train.batch_rows
    return run_cost(trunk, recipe.connection, tokens, mixture, recipe.data.length, recipe.compiled_feedback, rows)


def _recipe(experiment: Experiment, cell: Cell, seed: int, runs: Path) -> Recipe:
    raw: dict[str, Any] = copy.deepcopy(experiment.recipe)
    for key, value in cell.set.items():
        set_key(raw, key, value, f"{experiment.name}, cell {cell.name}")
    owner, name = cell.run.split("/") if cell.run else (experiment.name, cell.name)
    raw |= {"name": f"{owner}-{name}", "seed": seed, "output": (runs / owner / f"{name}-seed-{seed}").as_posix()}
    recipe = parse(Recipe, raw, f"{experiment.name}, cell {cell.name}")
    if recipe.model.source or recipe.train.initial_checkpoint:
        raise ValueError(f"{experiment.name}, cell {cell.name}: an experiment trains models from scratch, this recipe names a source")
    return recipe


def _with_equal_compute(recipe: Recipe, other: Recipe, equal: EqualTo) -> Recipe:
    wanted, have = expected_cost(other), expected_cost(recipe)
    counts = [getattr(wanted, AMOUNTS[by]) / getattr(have, AMOUNTS[by]) for by in equal.by]
    steps = {max(1, round(recipe.train.steps * count)) for count in counts}
    if len(steps) > 1:
        raise ValueError(f"{recipe.name}: equal {' and '.join(equal.by)} ask for different steps ({', '.join(map(str, sorted(steps)))})")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps.pop()})})


def check_jobs(experiment: Experiment, jobs: Sequence[Job]) -> None:
    """Raises ValueError, naming the cell, for a model that could not be measured as is asked, for a comparison with an evaluation that
    there will not be, and for two cells with one folder and different recipes."""
    cells = {job.cell.name: job for job in jobs if job.seed == jobs[0].seed}
    by_folder: dict[str, Job] = {}
    for job in cells.values():
        other = by_folder.setdefault(str(job.folder), job)
        if other.recipe != job.recipe:
            raise ValueError(f"{experiment.name}: cells {other.cell.name} and {job.cell.name} have one folder and different recipes")
        _check_measure(experiment, job)
    for asked in experiment.comparisons:
        for name, evaluation in ((asked.cell, asked.reading), (asked.to, asked.to_reading)):
            if name in cells and evaluation not in (known := evaluations_of(cells[name].recipe, experiment.measure)):
                raise ValueError(f"{experiment.name}: comparisons: {name} has no evaluation '{evaluation}' (it has {', '.join(known)})")


def _check_measure(experiment: Experiment, job: Job) -> None:
    measure, where = experiment.measure, f"{experiment.name}, cell {job.cell.name}: measure"
    is_task = isinstance(job.recipe.data.source, TaskSource)
    if isinstance(measure, PositionsMeasure) and not is_task:
        raise ValueError(f"{where}: positions are for built-in tasks, not for {job.recipe.data.source.kind}")
    if isinstance(measure, ProbeMeasure):
        if is_task:
            raise ValueError(f"{where}: probes are made on App. F's texts, whose words a built-in task does not have")
        return
    longest = max(measure.positions) if isinstance(measure, PositionsMeasure) else measure.length or 0
    if longest > (context := shape_of(job.recipe).context):
        what = "position" if isinstance(measure, PositionsMeasure) else "length"
        raise ValueError(f"{where}: {what} {longest} is beyond the model's context of {context}")
