"""`fullband experiment`: run a grid of recipes with seeds, and write what it shows."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

RUNS = Path("runs/experiments")

if TYPE_CHECKING:
    from rich.console import Console

    from fullband.experiments import Experiment, Job
    from fullband.model import FullBandModel
    from fullband.training.progress import TrainingProgress

EXAMPLES = """Examples:

\b
  fullband experiment --list
  fullband experiment s3 --dry-run                 jobs, steps and expected compute
  fullband experiment s3                           run or continue it, and write results/s3
  fullband experiment s3 --seeds 0 --cells fullband,standard-compute
  fullband experiment s3 --seeds 0,1,2,3,4         more seeds than it defines
  fullband experiment s3 --report                  write results/s3 from the finished jobs

\b
  Two jobs at a time, each on one core (add a line for each further core):
    OMP_NUM_THREADS=1 fullband experiment s3 &
    OMP_NUM_THREADS=1 fullband experiment s3
"""


def experiment(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of an experiment (see --list), or a yaml file.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the experiments that are included.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run and its expected cost; write nothing.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Run nothing; write the results of the finished jobs.")] = False,
    seeds: Annotated[str | None, typer.Option(metavar="N,…", help="Seeds to run and report; default: as the experiment defines.")] = None,
    cells: Annotated[str | None, typer.Option(metavar="NAME,…", help="Run and report only these cells.")] = None,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs; they are kept, so that jobs can resume.")] = RUNS,
    results: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder of the report; default: results/NAME.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Run an experiment: every cell with every seed, one job after another.

    Finished jobs are not run again; one that was stopped or killed continues from its last checkpoint. The same command run several
    times at once shares the jobs between the processes. The report has a table with intervals over seeds, pictures, the logs and recipes
    of all jobs, and the compute spent. With fewer than three seeds it is only a smoke test.
    """
    from fullband.cli.console import messages, output, print_json
    from fullband.experiments import check_jobs, find_experiment, jobs_of, list_experiments, load_experiment, write_report
    from fullband.files import check_place

    if show_list:
        listed = [load_experiment(path) for path in list_experiments()]
        print_json({"experiments": [summary(found) for found in listed]}) if as_json else print_list(output(), listed)
        return
    if name is None:
        raise ValueError("name an experiment; `fullband experiment --list` shows them")
    loaded = load_experiment(find_experiment(name))
    jobs = jobs_of(loaded, parse_seeds(seeds), runs)
    check_jobs(loaded, jobs)
    chosen = choose(loaded, jobs, cells)
    if dry_run:
        plan = [job_plan(loaded, job) for job in chosen]
        print_json({"name": loaded.name, "jobs": plan}) if as_json else print_plan(output(), loaded, plan)
        return
    folder = results or Path("results") / loaded.name
    for place in (folder, runs):
        check_place(place)  # refused before hours of training
    which = [word for option, value in (("--seeds", seeds), ("--cells", cells)) if value for word in (option, value)]
    if not report:
        where = [] if runs == RUNS else ["--runs", str(runs)]
        where += ["-o", str(results)] if results else []
        run_jobs(messages(), loaded, chosen, shlex.join(["fullband", "experiment", name, *which, *where, *["--json"] * as_json]))
    found = write_report(loaded, chosen, folder, shlex.join(["fullband", "experiment", loaded.name, *which]))
    print_json(found) if as_json else print_result(output(), found, folder)


def parse_seeds(text: str | None) -> list[int] | None:
    """None = the experiment's own. Raises ValueError."""
    for word in (named := words(text)):
        if not word.isdecimal():
            raise ValueError(f"--seeds: must be whole numbers from 0, got '{word}'")
    return [int(word) for word in dict.fromkeys(named)] or None


def choose(experiment: Experiment, jobs: list[Job], cells: str | None) -> list[Job]:
    """The jobs of these cells. Raises ValueError for one that the experiment does not have."""
    known = [cell.name for cell in experiment.cells]
    wanted = words(cells) or known
    for word in wanted:
        if word not in known:
            raise ValueError(f"--cells: {experiment.name} has no '{word}' (it has {', '.join(known)})")
    return [job for job in jobs if job.cell.name in wanted]


def words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def run_jobs(console: Console, experiment: Experiment, jobs: list[Job], command: str) -> None:
    """Run what is not finished. A signal ends it with the signal's exit code; the run in hand has been saved.

    A job that another process has in hand is passed over, and asked for again after the others, in case that process was stopped.
    """
    from fullband.experiments.jobs import StoppedError, run_job, state_of
    from fullband.files import InUseError
    from fullband.training.progress import TrainingProgress

    states = [state_of(experiment, job) for job in jobs]  # all are checked before the first one trains
    waiting = [(number, job) for number, (job, state) in enumerate(zip(jobs, states, strict=True), start=1) if state.word != "finished"]
    while waiting:
        in_use = []
        for number, job in waiting:
            console.print(f"job {number} of {len(jobs)}: {job.name}", style="bold", soft_wrap=True)
            try:
                with TrainingProgress(console) as progress:
                    run_job(experiment, job, progress, partial(_measuring, progress))
            except InUseError:
                console.print("another process is running it", soft_wrap=True)
                in_use.append((number, job))
            except StoppedError as stopped:
                console.print(f"stopped; continue with: {command}", soft_wrap=True)
                raise typer.Exit(128 + stopped.signal) from None
        if len(in_use) == len(waiting):
            return
        waiting = in_use


def _measuring(training: TrainingProgress, model: FullBandModel, positions: int) -> AbstractContextManager[None]:
    from fullband.cli.progress import forward_progress

    training.stop()
    return forward_progress(training.console, model, positions, "measuring")


def summary(experiment: Experiment) -> dict[str, Any]:
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "cells": [cell.name for cell in experiment.cells],
        "seeds": experiment.seeds,
    }


def print_list(console: Console, listed: list[Experiment]) -> None:
    from fullband.cli.tables import print_table, table

    made = table(["name", "what it asks", "cells", "seeds"], words=2)
    for found in listed:
        made.add_row(found.name, found.title, str(len(found.cells)), ", ".join(map(str, found.seeds)))
    print_table(console, "Experiments", made, "Run one with: fullband experiment NAME")


def job_plan(experiment: Experiment, job: Job) -> dict[str, Any]:
    from dataclasses import asdict

    from fullband.experiments.jobs import state_of

    return {
        "cell": job.cell.name,
        "seed": job.seed,
        "state": state_of(experiment, job).word,
        "folder": str(job.folder),
        "steps": job.recipe.train.steps,
        "expected": asdict(job.cost),
    }


def print_plan(console: Console, experiment: Experiment, plan: list[dict[str, Any]]) -> None:
    from fullband.amounts import short
    from fullband.cli.tables import print_table, table

    made = table(["job", "state", "steps", "tokens", "token-equivalent", "computed", "FLOPs"], words=2)
    for job in plan:
        cost = job["expected"]
        counts = [short(cost[key]) for key in ("tokens", "token_equivalent", "executed_positions")]
        made.add_row(f"{job['cell']}, seed {job['seed']}", job["state"], f"{job['steps']:,}", *counts, f"{cost['flops']:.2e}")
    print_table(console, f"{experiment.name}: {experiment.title}", made, "Expected compute; nothing was written.")


def print_result(console: Console, found: dict[str, Any], folder: Path) -> None:
    from fullband.cli.tables import print_table, table
    from fullband.experiments.report import cell_of, evaluation_words, seeds_of, unit

    words = partial(evaluation_words, kind=found["measure"]["kind"])
    columns = list(found["rows"][0]["columns"])
    made = table(["cell", "read", "n (seeds)", *columns], words=2)
    for row in found["rows"]:
        cells = [cell_of(row["columns"][column]) for column in columns]
        made.add_row(row["cell"], words(row["reading"]), seeds_of(found, row["cell"]), *cells)
    smoke = "Smoke test (fewer than three seeds, no claim): " if found["smoke_test"] else ""
    print_table(console, f"{smoke}{found['title']}", made, f"{unit(found)}; mean ± half of the 95% interval over seeds.")
    for compared in found["comparisons"]:
        of = ", ".join(f"{column}: {v['mean']:+.3f} ± {v['half_width']:.3f} ({v['shows']})" for column, v in compared["columns"].items())
        ours, theirs = (f"{compared[a]}, {words(compared[b])}" for a, b in (("cell", "reading"), ("to", "to_reading")))
        console.print(f"{ours} minus {theirs}: {of}", soft_wrap=True)
    if found["unfinished"]:
        console.print(f"not run: {'; '.join(found['unfinished'])}", soft_wrap=True)
    console.print(f"report: {folder / 'README.md'}", soft_wrap=True)
