"""Jobs: finished ones are not run again, killed ones go on and end where an undisturbed run ends, controls bite."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.grids import GRID, write_grid
from fullband.experiments import Experiment, Job, finished_results, jobs_of, load_experiment, run_job
from fullband.experiments.jobs import expected_cost, state_of, training_numbers
from fullband.experiments.measure import evaluation_name, evaluations_of, measure
from fullband.training import RunResult
from fullband.training.milestones import Milestones


class Killed(Exception):
    pass


class KillAt:
    """A watcher that ends the process, so to say, right after a step."""

    def __init__(self, step: int):
        self.step = step

    def started(self, run: Any, groups: str) -> None: ...

    def evaluated(self, run: Any, losses: dict[str, float]) -> None: ...

    def stepped(self, run: Any, values: dict[str, Any]) -> None:
        if run.step == self.step:
            raise Killed


class NeverTrains(KillAt):
    def started(self, run: Any, groups: str) -> None:
        raise AssertionError("a finished job was trained again")


def toy(folder: Path, **changes: Any) -> tuple[Experiment, list[Job]]:
    experiment = load_experiment(write_grid(folder, **changes))
    return experiment, jobs_of(experiment, [0], folder / "runs")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, list[Job], list[dict[str, Any]]]:
    experiment, jobs = toy(tmp_path_factory.mktemp("toy"))
    return experiment, jobs, [run_job(experiment, job) for job in jobs]


def test_what_a_job_leaves(done: Any) -> None:
    experiment, jobs, (fed, plain) = done
    assert list(fed["values"]) == ["fused-0", "fused-1", "exact", "exact, zeroed"] and list(plain["values"]) == ["standard"]
    assert set(fed["values"]["exact"]) == {"3", "12"}
    assert fed["training"]["tokens"] == 20 * 4 * 12 and fed["training"]["token_equivalent"] > fed["training"]["tokens"]
    assert abs(plain["training"]["token_equivalent"] - fed["training"]["token_equivalent"]) <= 4 * 12
    assert fed["training"]["executed_flops"] == pytest.approx(jobs[0].cost.flops, rel=0.1)
    assert finished_results(experiment, jobs) == [fed, plain]


def test_what_compiled_blocks_cost_is_counted_as_expected(done: Any) -> None:
    """Later passes of compiled blocks start at few places, which the counted cost knows as the expected one does."""
    job = done[1][0]
    recipe = job.recipe.model_copy(update={"train": job.recipe.train.model_copy(update={"compile": True})})
    compiled, expected = replace(job, recipe=recipe), expected_cost(recipe)
    amounts: Any = (expected.tokens, 0, expected.executed_positions)  # expectations, so no whole numbers
    trained = RunResult(job.folder, job.folder, 1, *amounts, {}, Milestones(), 1.0)
    assert training_numbers(compiled, trained, 1.0, False)["executed_flops"] == pytest.approx(expected.flops, rel=1e-6)
    assert expected_cost(job.recipe).executed_positions < expected.executed_positions


def test_a_finished_job_is_not_run_again(done: Any) -> None:
    experiment, jobs, results = done
    assert [run_job(experiment, job, NeverTrains(0)) for job in jobs] == results


def test_another_measure_reads_the_trained_model_again(done: Any, tmp_path: Path) -> None:
    _, jobs, (fed, _) = done
    wider = load_experiment(write_grid(tmp_path, measure=GRID["measure"] | {"positions": [1, 6]}))
    job = next(job for job in jobs_of(wider, [0], jobs[0].folder.parents[1]) if job.cell.name == "fed")
    kept = (job.folder / "cell.json").read_bytes()
    assert state_of(wider, job).word == "begun"
    again = run_job(wider, job, NeverTrains(0))
    assert set(again["values"]["exact"]) == {"1", "6"} and again["training"] == fed["training"]
    (job.folder / "cell.json").write_bytes(kept)


def test_a_killed_job_goes_on_from_its_checkpoint(done: Any, tmp_path: Path) -> None:
    _, _, (whole, _) = done
    experiment, (job, _) = toy(tmp_path)
    with pytest.raises(Killed):
        run_job(experiment, job, KillAt(13))
    assert state_of(experiment, job).word == "begun"  # a checkpoint was written after step 10
    resumed = run_job(experiment, job)
    assert resumed["values"] == whole["values"] and resumed["training"]["resumed"]
    assert [json.loads(line)["step"] for line in (job.folder / "metrics.jsonl").read_text().splitlines() if "objective" in line] == [
        *range(20)
    ]


def test_a_job_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    experiment, (job, _) = toy(tmp_path)
    with pytest.raises(Killed):
        run_job(experiment, job, KillAt(2))
    assert state_of(experiment, job).word == "not begun"
    assert not run_job(experiment, job)["training"]["resumed"]


def test_a_result_belongs_to_its_recipe(done: Any, tmp_path: Path) -> None:
    _, jobs, _ = done
    other = load_experiment(write_grid(tmp_path, cells=[{"name": "fed", "set": {"feedback.jitter": 0.5}}], comparisons=[]))
    (job,) = jobs_of(other, [0], jobs[0].folder.parents[1])
    with pytest.raises(ValueError, match="holds a run of another recipe than toy's"):
        run_job(other, job)


def test_a_default_that_is_written_out_is_no_other_recipe(done: Any) -> None:
    """Runs from before `prefix_rounding` could be left open say 1."""
    experiment, jobs, _ = done
    path = jobs[0].folder / "recipe.yaml"
    kept = path.read_text(encoding="utf-8")
    path.write_text(kept.replace("prefix_rounding: null", "prefix_rounding: 1"), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != kept
    assert state_of(experiment, jobs[0]).word == "finished"
    path.write_text(kept, encoding="utf-8")


def test_a_zeroed_state_cannot_tell_two_histories_apart(done: Any) -> None:
    """Read exactly without its carried state, and with windows that end before it, a position knows nothing of the first token."""
    experiment, (job, _), _ = done
    zeroed = job.recipe.model_copy(update={"feedback": job.recipe.feedback.model_copy(update={"control": "zeroed"})})
    found = measure(zeroed, experiment.measure)
    assert list(found.values) == ["fused-0", "fused-1", "exact"]  # under a control already: no reading under another one
    assert found.values["exact"] == measure(job.recipe, experiment.measure).values["exact, zeroed"]


def test_readings_are_known_before_they_are_made(done: Any) -> None:
    experiment, jobs, results = done
    for job, result in zip(jobs, results, strict=True):
        assert evaluations_of(job.recipe, experiment.measure) == list(result["values"])


def test_evaluation_names(done: Any) -> None:
    _, (fed, plain), _ = done
    assert [evaluation_name(fed.recipe, how) for how in (0, 4, "exact")] == ["fused-0", "fused-4", "exact"]
    assert evaluation_name(plain.recipe, 0) == "standard"


def test_text_is_measured_by_loss_and_verdict(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {n} of some text, and more of it"}) + "\n" for n in range(60)), encoding="utf-8")
    recipe = GRID["recipe"] | {"data": {"source": {"kind": "files", "paths": [str(text)], "validation_fraction": 0.5}, "length": 24}}
    measure_ = {"kind": "settling", "rows": 2, "passes": 6, "length": 20, "feedback_passes": [0, 1, 5, "exact"]}
    experiment, jobs = toy(tmp_path, recipe=recipe, measure=measure_, comparisons=[])
    fed, plain = (run_job(experiment, job) for job in jobs)
    assert evaluations_of(jobs[0].recipe, experiment.measure) == list(fed["values"]) == ["fused-0", "fused-1", "fused-5", "exact"]
    assert fed["verdict"] and plain["verdict"] is None
    losses = [record["loss"] for record in fed["trace"]["records"]]
    assert [fed["values"][f"fused-{k}"]["loss"] for k in (0, 1, 5)] == [losses[0], losses[1], losses[5]]
