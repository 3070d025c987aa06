"""The jobs of an experiment: every cell with every seed, as recipes ready to train; what can be known to go wrong with them before hours
of training; and running them: one that is finished is not run again, one that was killed goes on from its last checkpoint."""

from __future__ import annotations

import copy
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from fullband.config import Recipe, TaskSource, load_recipe, set_key
from fullband.costs import RunCost, pass_mixture, run_cost, run_flops
from fullband.experiments.config import Cell, EqualTo, Experiment, PositionsMeasure, ProbeMeasure
from fullband.experiments.measure import RunProgress, evaluations_of, measure, silent
from fullband.files import alone_in, read_json, write_json
from fullband.model import FullBandModel
from fullband.strict import parse, shape
from fullband.training import RunResult, train
from fullband.training.checkpoint import Checkpoints
from fullband.training.loop import Watcher
from fullband.training.resolve import shape_of
from fullband.training.run import RECIPE

RUNS = Path("runs") / "experiments"
AMOUNTS = {"tokens": "tokens", "token-equivalent": "token_equivalent", "flops": "flops"}  # of `RunCost`
CELL = "cell.json"
IN_HAND = ".job.lock"  # held from the training's begin to the measure's end; the run's own lock is the training's


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


_TRAINING = shape(
    "Training",
    **dict.fromkeys(("steps", "tokens", "token_equivalent", "executed_positions"), int),
    **dict.fromkeys(("executed_flops", "seconds", "processor_seconds"), float),
    resumed=bool,
    switch_on_step=int | None,
    switch_on_shock=float | None,
    crossover_step=int | None,
)
_CELL = shape(  # what reports need of cell.json
    "Cell",
    seed=int,
    measure=dict[str, Any],
    values=Annotated[dict[str, dict[str, float]], Field(min_length=1)],
    verdict=str | None,
    training=_TRAINING,
    measuring_seconds=float,
    hardware=dict[str, Any],
)


class StoppedError(Exception):
    """A signal ended the training of a cell, which is saved; `signal` is its number."""

    def __init__(self, signal: int):
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


@dataclass(frozen=True)
class JobState:
    """How far a job has come: "finished", "begun" (it will be resumed) or "not begun".

    result  what is known of it; unless it is finished, it was measured in another way than is asked for now
    """

    word: str
    result: dict[str, Any] | None


def state_of(experiment: Experiment, job: Job) -> JobState:
    """Raises ValueError if the job's folder holds a run of another recipe, as a result belongs to the one beside it, or a damaged one."""
    begun = Checkpoints(job.folder / "checkpoints").last() is not None
    found = job.folder / CELL
    if (begun or found.is_file()) and _trained(load_recipe(job.folder / RECIPE)) != _trained(job.recipe):
        raise ValueError(f"{job.folder}: holds a run of another recipe than {experiment.name}'s; remove it, or choose another --runs")
    if not found.is_file():
        return JobState("begun" if begun else "not begun", None)
    result = _read_result(found) | {"cell": job.cell.name}
    return JobState("finished" if result["measure"] == experiment.measure.model_dump(mode="json") else "begun", result)


def _trained(recipe: Recipe) -> Recipe:
    """What decides how a run is trained: its folder may have moved, or be written differently; a default may be written out."""
    feedback = recipe.compiled_feedback
    rounding = {"prefix_rounding": feedback.rounding}
    return recipe.model_copy(update={"output": None, "feedback": feedback.model_copy(update=rounding)})


def _read_result(path: Path) -> dict[str, Any]:
    """Raises ValueError naming a file that is damaged."""
    try:
        result: dict[str, Any] = read_json(path)
        parse(_CELL, result, str(path))
    except ValueError as error:
        what = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path}: damaged ({what}); remove it, and the model is measured again") from None
    return result


def finished_results(experiment: Experiment, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The results of the jobs that are finished."""
    states = [state_of(experiment, job) for job in jobs]
    return [state.result for state in states if state.word == "finished" and state.result is not None]


def run_job(experiment: Experiment, job: Job, watcher: Watcher | None = None, progress: RunProgress = silent) -> dict[str, Any]:
    """Train (or go on training) and measure one job; what was found is kept as cell.json in its folder, and returned.

    Raises StoppedError when a signal ended the training, InUseError if another process has the job in hand, ValueError as `train` does.
    """
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(job.folder.parent, f"{job.folder.name}{IN_HAND}"):
        state = state_of(experiment, job)
        if state.word == "finished" and state.result is not None:
            return state.result
        return _run(experiment, job, state, watcher, progress)


def _run(experiment: Experiment, job: Job, state: JobState, watcher: Watcher | None, progress: RunProgress) -> dict[str, Any]:
    training = state.result["training"] if state.result else _train(job, state.word == "begun", watcher)
    begun = time.perf_counter()
    measured = measure(job.recipe, experiment.measure, progress)
    result = {
        "cell": job.cell.name,
        "seed": job.seed,
        "measure": experiment.measure.model_dump(mode="json"),
        **asdict(measured),
        "training": training,
        "measuring_seconds": round(time.perf_counter() - begun, 1),
        "hardware": hardware(),
    }
    write_json(job.folder / CELL, result)
    return result


def _train(job: Job, resume: bool, watcher: Watcher | None) -> dict[str, Any]:
    processor = time.process_time()
    trained = train(job.recipe, resume, watcher)
    if trained.signal:
        raise StoppedError(trained.signal)
    return training_numbers(job, trained, time.process_time() - processor, resume)


def training_numbers(job: Job, trained: RunResult, processor_seconds: float, resumed: bool) -> dict[str, Any]:
    """What was spent. Seconds are those of the last sitting where a run was `resumed`."""
    recipe = job.recipe
    trunk = FullBandModel.load(trained.folder).config.trunk
    rows = recipe.train.microbatch_rows or recipe.train.batch_rows
    return {
        "steps": trained.steps,
        "tokens": trained.tokens,
        "token_equivalent": trained.token_equivalent,
        "executed_positions": trained.executed_positions,
        "executed_flops": run_flops(
            trunk, recipe.connection, trained.tokens, trained.executed_positions, recipe.data.length, recipe.compiled_feedback, rows
        ),
        "seconds": round(trained.seconds, 1),
        "processor_seconds": round(processor_seconds, 1),
        "resumed": resumed,
        "switch_on_step": trained.milestones.switch_on_step,
        "switch_on_shock": trained.milestones.shock,
        "crossover_step": trained.milestones.crossover_step,
        "validation": trained.validation,
    }


def hardware() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "device": device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("fullband", "torch")},
    }


def logs_of(job: Job) -> list[Path]:
    """The files of a job that its results keep."""
    return [path for name in (RECIPE, "metrics.jsonl", CELL) if (path := job.folder / name).is_file()]
