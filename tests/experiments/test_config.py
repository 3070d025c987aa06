"""Experiments are read strictly, and the shipped ones are whole: every job's recipe fits, and equal compute is equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.grids import GRID, write_grid
from fullband.experiments import check_jobs, find_experiment, jobs_of, load_experiment

FOLDER = Path(__file__).parents[2] / "recipes" / "experiments"
SHIPPED = sorted(FOLDER.glob("*.yaml"))


def test_the_first_experiments_are_there() -> None:
    assert {path.stem for path in SHIPPED} >= {"s3", "schedule-text", "fusion-s3", "probes"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_experiment_is_whole(path: Path, tmp_path: Path) -> None:
    experiment = load_experiment(path)
    assert experiment.name == path.stem and len(experiment.seeds) >= 3
    jobs = jobs_of(experiment, experiment.seeds[:1], tmp_path)
    check_jobs(experiment, jobs)
    assert [job.cell.name for job in jobs] == [cell.name for cell in experiment.cells]
    by_cell = {job.cell.name: job for job in jobs}
    for cell in experiment.cells:
        if cell.equal:
            ours, theirs = by_cell[cell.name].cost, by_cell[cell.equal.cell].cost
            for by in cell.equal.by:
                key = by.replace("-", "_")
                step = getattr(ours, key) / by_cell[cell.name].recipe.train.steps
                assert abs(getattr(ours, key) - getattr(theirs, key)) <= step


def test_a_shared_run_is_the_other_experiments(tmp_path: Path) -> None:
    fusion, s3 = (load_experiment(FOLDER / f"{name}.yaml") for name in ("fusion-s3", "s3"))
    theirs = next(job for job in jobs_of(s3, [1], tmp_path) if job.cell.name == "fullband")
    shared = next(job for job in jobs_of(fusion, [1], tmp_path) if job.cell.name == "gated")
    assert shared.recipe == theirs.recipe and fusion.measure == s3.measure


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sedes": [1]}, "sedes: unknown key; did you mean 'seeds'?"),
        ({"cells": [{"name": "fed", "equals": {}}]}, "cells.0.equals: unknown key; did you mean 'equal'?"),
        ({"cells": [{"name": "fed"}, {"name": "fed"}]}, "cells: must not repeat, got 'fed' twice"),
        ({"seeds": [1, 1]}, "seeds: must not repeat, got 1 twice"),
        ({"comparisons": [{"cell": "fed", "reading": "exact", "to": "plane", "to_reading": "x"}]}, "no cell is called 'plane'"),
        ({"cells": [{"name": "fed", "set": {"seed": 1}}], "comparisons": []}, "the experiment sets 'seed' itself"),
        ({"measure": {"kind": "positions", "positions": []}}, "measure.positions"),
        ({"measure": {"kind": "positions", "positions": [3, 0]}}, "measure.positions.1: must be at least 1"),
        ({"measure": {"kind": "settling", "passes": 4, "feedback_passes": [0, 4]}}, "measure: feedback_passes: 4 of them are 5 passes"),
        ({"measure": {"kind": "settling", "feedback_passes": ["converged"]}}, "measure.feedback_passes.0"),
        ({"measure": {"kind": "probe", "prefills": ["3"]}}, "measure.prefills.0: must be 'standard', '1', '2', '4' or 'full', got '3'"),
        ({"cells": [{"name": "Fed"}], "comparisons": []}, "cells.0.name"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        load_experiment(write_grid(tmp_path, **changes))
    assert words in str(error.value) and "\n" not in str(error.value) and "toy.yaml" in str(error.value)


def test_a_chain_of_equal_cells_is_refused(tmp_path: Path) -> None:
    equal = {"cell": "plain", "by": "tokens"}
    with pytest.raises(ValueError, match="made equal to a cell that is itself"):
        load_experiment(write_grid(tmp_path, cells=[*GRID["cells"], {"name": "third", "equal": equal}]))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"feedback.schedul": "none"}, "toy, cell bad: feedback.schedul: unknown key; did you mean 'schedule'?"),
        ({"train.steps.count": 3}, "toy, cell bad: steps is a value, not a section"),
        ({"model": {"source": "somewhere"}}, "trains models from scratch"),
    ],
)
def test_a_cell_that_does_not_fit_is_named(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    experiment = load_experiment(write_grid(tmp_path, cells=[{"name": "bad", "set": changed}], comparisons=[]))
    with pytest.raises(ValueError) as error:
        jobs_of(experiment, [0], tmp_path)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"measure": GRID["measure"] | {"positions": [3, 999]}}, "cell fed: measure: position 999 is beyond the model's context of"),
        ({"measure": {"kind": "settling", "length": 999}}, "cell fed: measure: length 999 is beyond the model's context of"),
        ({"measure": {"kind": "probe"}}, "cell fed: measure: probes are made on App. F's texts"),
        (
            {"comparisons": [{"cell": "fed", "reading": "fused-3", "to": "plain", "to_reading": "standard"}]},
            "comparisons: fed has no evaluation 'fused-3' (it has fused-0, fused-1, exact, exact, zeroed)",
        ),
        (
            {"cells": [{"name": "fed"}, {"name": "plain", "run": "toy/fed", "set": {"feedback.schedule": "none"}}]},
            "cells fed and plain have one folder and different recipes",
        ),
    ],
)
def test_what_can_be_known_is_said_before_training(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    experiment = load_experiment(write_grid(tmp_path, **{"comparisons": []} | changes))
    with pytest.raises(ValueError) as error:
        check_jobs(experiment, jobs_of(experiment, [0], tmp_path))
    assert words in str(error.value)


def test_counts_that_ask_for_different_steps_are_refused(tmp_path: Path) -> None:
    cells = [{"name": "fed"}, {"name": "plain", "set": {"feedback.schedule": "none"}, "equal": {"cell": "fed", "by": ["tokens", "flops"]}}]
    with pytest.raises(ValueError, match="tokens and flops ask for different steps"):
        jobs_of(load_experiment(write_grid(tmp_path, cells=cells)), [0], tmp_path)


def test_seeds_come_one_after_the_other(tmp_path: Path) -> None:
    jobs = jobs_of(load_experiment(write_grid(tmp_path)), runs=tmp_path)
    assert [job.name for job in jobs] == [f"{cell}-seed-{seed}" for seed in (0, 1, 2) for cell in ("fed", "plain")]
    assert {job.recipe.seed for job in jobs} == {0, 1, 2}


def test_an_unknown_experiment_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'fusion-s3'"):
        find_experiment("fusion-s4", FOLDER)
    with pytest.raises(ValueError, match="no such file"):
        find_experiment("elsewhere.yaml", FOLDER)
    assert find_experiment("s3", FOLDER) == FOLDER / "s3.yaml"
