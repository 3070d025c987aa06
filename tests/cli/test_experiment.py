"""`fullband experiment`: a small grid from list to report, stopped and gone on with, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.commands import fullband, refused
from experiments.grids import write_grid
from fullband.files import alone_in
from fullband.plots.runs import read_run

CELLS = [{"name": "fed"}, {"name": "plain", "set": {"feedback.schedule": "none"}, "equal": {"cell": "fed", "by": "token-equivalent"}}]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished grid of two cells with three seeds: folders runs and results beside toy.yaml."""
    folder = tmp_path_factory.mktemp("grid")
    path = write_grid(folder)
    done = fullband("experiment", path, "--runs", folder / "runs", "-o", folder / "results", "--json")
    assert done.code == 0, done.err
    assert done.json == json.loads((folder / "results" / "result.json").read_text())
    return folder


def arguments(folder: Path) -> list[str | Path]:
    return ["experiment", folder / "toy.yaml", "--runs", folder / "runs", "-o", folder / "results"]


def test_the_report(grid: Path) -> None:
    from matplotlib.image import imread

    results = grid / "results"
    assert {path.name for path in results.iterdir()} == {"README.md", "result.json", "summary.png", "logs"}
    jobs = {f"{cell}-seed-{n}" for cell in ("fed", "plain") for n in range(3)}
    assert {path.name for path in (results / "logs").iterdir()} == {"SHA256SUMS", *jobs}
    assert {path.name for path in (results / "logs" / "fed-seed-1").iterdir()} == {"recipe.yaml", "metrics.jsonl.gz", "cell.json.gz"}
    assert read_run(results / "logs" / "fed-seed-1").to_json() == read_run(next((grid / "runs").rglob("fed-seed-1"))).to_json()
    text = (results / "README.md").read_text()
    assert text.startswith("# A toy\n") and "| fed | exact, zeroed | 3 (0, 1, 2) |" in text and "## Compute spent" in text
    assert str(grid) not in text
    assert imread(results / "summary.png").shape[1] > 800


def test_what_is_finished_is_not_run_again(grid: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (grid / "runs").rglob("*") if path.is_file()}
    done = fullband(*arguments(grid))
    assert done.code == 0 and "training" not in done.err and "fed, exact minus plain, without feedback: 3: " in done.out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_dry_run_says_what_would_be_done(grid: Path, tmp_path: Path) -> None:
    plan = fullband(*arguments(grid), "--dry-run", "--json").json["jobs"]
    assert len(plan) == 6 and {job["state"] for job in plan} == {"finished"}
    fed, plain = plan[:2]
    assert (fed["steps"], plain["cell"]) == (20, "plain") and plain["steps"] > 20
    assert plain["expected"]["token_equivalent"] == pytest.approx(fed["expected"]["token_equivalent"], rel=0.05)
    table = fullband("experiment", write_grid(tmp_path), "--runs", tmp_path / "runs", "--dry-run", "--seeds", "1")
    assert "fed, seed 1" in table.out and "fed, seed 0" not in table.out and "not begun" in table.out
    assert not (tmp_path / "runs").exists()


def test_some_seeds_are_a_smoke_test(tmp_path: Path) -> None:
    write_grid(tmp_path)
    done = fullband(*arguments(tmp_path), "--seeds", "0", "--cells", "fed")
    assert done.code == 0 and "Smoke test" in done.out and "not run: fed, seed 1; fed, seed 2; plain, seed 0" in " ".join(done.out.split())
    assert (tmp_path / "results" / "README.md").read_text().startswith("# Smoke test: A toy")
    again = fullband(*arguments(tmp_path), "--report", "--json").json
    assert again["smoke_test"] and again["comparisons"] == []


def test_a_signal_stops_it_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fullband.training.progress import TrainingProgress

    write_grid(tmp_path, cells=CELLS[:1], comparisons=[])
    stepped = TrainingProgress.stepped

    def interrupted(self: Any, run: Any, values: dict[str, Any]) -> None:
        stepped(self, run, values)
        if run.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "stepped", interrupted)
        stopped = fullband(*arguments(tmp_path), "--seeds", "0")
    assert stopped.code == 143 and not (tmp_path / "results").exists()
    again = stopped.err.splitlines()[-1].partition("continue with: fullband ")[2]
    done = fullband(*shlex.split(again), "--json")
    assert done.code == 0 and "resuming" in done.err and done.json["cells"][0]["resumed"]


def test_a_job_in_hand_elsewhere_is_passed_over(tmp_path: Path) -> None:
    write_grid(tmp_path, cells=CELLS[:1], comparisons=[])
    folder = tmp_path / "runs" / "toy"
    folder.mkdir(parents=True)
    with alone_in(folder, "fed-seed-1.job.lock"):
        done = fullband(*arguments(tmp_path))
    assert done.code == 0 and done.err.count("another process is running it") == 2  # asked for again behind the others
    assert "not run: fed, seed 1" in " ".join(done.out.split())
    again = fullband(*arguments(tmp_path), "--json")
    assert not again.json["unfinished"] and "fed-seed-1" in again.err and "fed-seed-0" not in again.err


@pytest.mark.slow
def test_processes_share_a_grid(tmp_path: Path) -> None:
    """Each job is trained by one of them, and the last to end reports all."""
    write_grid(tmp_path, cells=CELLS[:1], comparisons=[])
    command = [sys.executable, "-m", "fullband", *map(str, arguments(tmp_path))]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    trained = [line.split()[1] for text in said for line in text.splitlines() if line.startswith("training ")]
    assert len(trained) == len(set(trained)) == 3
    assert fullband(*arguments(tmp_path), "--report", "--json").json["unfinished"] == []


def test_measuring_has_a_bar_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fullband.cli import progress
    from fullband.cli.experiment import run_jobs
    from fullband.experiments import jobs_of, load_experiment

    monkeypatch.setattr(progress, "forward_progress", partial(progress.forward_progress, patience=0.0))
    console = Console(file=io.StringIO(), force_terminal=True, force_interactive=True, color_system=None, width=160)
    loaded = load_experiment(write_grid(tmp_path, cells=CELLS[:1], comparisons=[]))
    run_jobs(console, loaded, jobs_of(loaded, [0], tmp_path / "runs"), "the command")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.index("20/20") < text.index("measuring ━")


def test_a_damaged_result_is_named(grid: Path) -> None:
    found = grid / "runs" / "toy" / "fed-seed-0" / "cell.json"
    whole = found.read_bytes()
    try:
        halves = [json.dumps(json.loads(whole) | {part: {}}).encode() for part in ("training", "values")]
        for content in (whole[: len(whole) // 2], b"", b"[]", b"{}", b"\xff", *halves):
            found.write_bytes(content)
            for more in ([], ["--report"], ["--dry-run"]):
                assert f"{found}: damaged" in refused(*arguments(grid), *more)
    finally:
        found.write_bytes(whole)


def test_a_place_of_results_that_cannot_be_written(tmp_path: Path) -> None:
    """Said before anything is trained."""
    write_grid(tmp_path)
    (tmp_path / "results").write_text("in the way")
    assert f"{tmp_path / 'results'}: can't be written" in refused(*arguments(tmp_path))
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").write_text("in the way")
    assert f"{tmp_path / 'runs'}: can't be written" in refused(*arguments(tmp_path)[:-1], tmp_path / "elsewhere")


def test_seeds_beyond_its_own(tmp_path: Path) -> None:
    write_grid(tmp_path, cells=CELLS[:1], comparisons=[])
    done = fullband(*arguments(tmp_path), "--seeds", "1,7", "--json")
    assert done.json["cells"][0]["seeds"] == [1, 7] and done.json["unfinished"] == ["fed, seed 0", "fed, seed 2"]


def test_the_runs_may_move(grid: Path, tmp_path: Path) -> None:
    shutil.copytree(grid / "runs", tmp_path / "moved")
    plan = fullband("experiment", grid / "toy.yaml", "--runs", tmp_path / "moved", "--dry-run", "--json").json["jobs"]
    assert {job["state"] for job in plan} == {"finished"}


def test_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert {"s3", "fusion-s3"} <= {found["name"] for found in fullband("experiment", "--list", "--json").json["experiments"]}
    assert "S3: fusions, controls, prefix mixin" in fullband("experiment", "--list").out
    monkeypatch.chdir(tmp_path)
    assert {"s3", "fusion-s3"} <= {found["name"] for found in fullband("experiment", "--list", "--json").json["experiments"]}, (
        "in any folder"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "-1"], "--seeds: must be whole numbers from 0, got '-1'"),
        (["--cells", "fad"], "--cells: toy has no 'fad'"),
        (["--report"], "no cell is finished yet"),
    ],
)
def test_refusals(words: list[str], said: str, tmp_path: Path) -> None:
    write_grid(tmp_path)
    assert said in refused(*arguments(tmp_path), *words)


def test_without_a_name() -> None:
    assert "--list` shows them" in refused("experiment")
