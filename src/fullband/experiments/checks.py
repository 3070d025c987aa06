"""What can be known to go wrong with a grid before hours of training."""

from __future__ import annotations

from collections.abc import Sequence

from fullband.config import TaskSource
from fullband.experiments.config import Experiment, PositionsMeasure, ProbeMeasure
from fullband.experiments.grid import Job
from fullband.experiments.measure import readings_of
from fullband.training.resolve import shape_of


def check_jobs(experiment: Experiment, jobs: Sequence[Job]) -> None:
    """Raises ValueError, naming the cell, for a model that could not be measured as is asked, for a comparison of a reading that there
    will not be, and for two cells with one folder and different recipes."""
    cells = {job.cell.name: job for job in jobs if job.seed == jobs[0].seed}
    by_folder: dict[str, Job] = {}
    for job in cells.values():
        other = by_folder.setdefault(str(job.folder), job)
        if other.recipe != job.recipe:
            raise ValueError(f"{experiment.name}: cells {other.cell.name} and {job.cell.name} have one folder and different recipes")
        _check_measure(experiment, job)
    for asked in experiment.comparisons:
        for name, reading in ((asked.cell, asked.reading), (asked.to, asked.to_reading)):
            if name in cells and reading not in (known := readings_of(cells[name].recipe, experiment.measure)):
                raise ValueError(f"{experiment.name}: comparisons: {name} has no reading '{reading}' (it has {', '.join(known)})")


def _check_measure(experiment: Experiment, job: Job) -> None:
    measure, where = experiment.measure, f"{experiment.name}, cell {job.cell.name}: measure"
    is_task = isinstance(job.recipe.data.source, TaskSource)
    if isinstance(measure, PositionsMeasure) and not is_task:
        raise ValueError(f"{where}: positions are for built-in tasks, not for {job.recipe.data.source.kind}")
    if isinstance(measure, ProbeMeasure):
        if is_task:
            raise ValueError(f"{where}: probes read App. F's texts, whose words a built-in task does not have")
        return
    longest = max(measure.positions) if isinstance(measure, PositionsMeasure) else measure.length or 0
    if longest > (context := shape_of(job.recipe).context):
        what = "position" if isinstance(measure, PositionsMeasure) else "length"
        raise ValueError(f"{where}: {what} {longest} is beyond the model's context of {context}")
