"""Law 8: a run that is killed and resumed, however often and wherever, is the run that was left alone, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullband.config import Recipe, load_recipe
from fullband.files import alone_in, write_manifest
from fullband.training import train
from fullband.training.metrics import read_metrics
from training.runs import assert_same_run, everything_on, in_child, kill_self, last_of, left_on_disk, needs_fork, with_changes

MakeRecipe = Callable[..., Recipe]


class KillAfter:
    """A watcher that kills its own process when `step` steps are done, before they are logged."""

    def __init__(self, step: int):
        self.step = step

    def started(self, run: Any, groups: str) -> None: ...

    def stepped(self, run: Any, values: dict[str, Any]) -> None:
        if run.step == self.step:
            kill_self()

    def evaluated(self, run: Any, losses: dict[str, float]) -> None: ...


@needs_fork
@pytest.mark.parametrize("kind", ["task", "text"])
def test_killed_twice_and_resumed_is_the_same_run(recipe: MakeRecipe, jsonl: str, kind: str) -> None:
    options = everything_on({"kind": "task"} if kind == "task" else {"kind": "files", "paths": [jsonl], "validation_fraction": 0.2})
    straight, broken = recipe("straight", **options), recipe("broken", **options)
    train(straight)
    metrics = left_on_disk(straight.output or "")["metrics"]
    used = {entry["passes"] for entry in metrics if "passes" in entry}
    assert used == {1, 2, 3} and any("deeper_share" in entry for entry in metrics)  # the options are really on
    for stop, resume in ((10, False), (11, True)):  # the second time before any new checkpoint
        assert in_child(lambda stop=stop, resume=resume: train(broken, resume=resume, watcher=KillAfter(stop))).signal == signal.SIGKILL
        assert last_of(broken.output or "").name == "step-00000009"
    train(broken, resume=True)
    assert_same_run(straight.output or "", broken.output or "")


@needs_fork
@pytest.mark.slow
def test_a_kill_after_any_step(recipe: MakeRecipe) -> None:
    """Each step from 1 to 19 is the last of some process; the one that goes on from there comes to the next checkpoint before it dies."""
    options = everything_on({"kind": "task"})
    straight = recipe("straight", **options)
    train(straight)
    for first in (1, 2, 3):
        broken = recipe(f"broken-{first}", **options)
        for step in range(first, 20, 3):
            killed = in_child(lambda step=step, broken=broken: train(broken, resume=step > 6, watcher=KillAfter(step)))
            assert killed.signal == signal.SIGKILL, killed.error
            assert step <= 3 or last_of(broken.output or "").name == f"step-{(step - 1) // 3 * 3:08d}"
        train(broken, resume=True)
        assert_same_run(straight.output or "", broken.output or "")


@needs_fork
@pytest.mark.slow
def test_a_process_killed_from_outside(recipe: MakeRecipe) -> None:
    """No cooperation at all: SIGKILL from another process whenever the metrics have grown, twice."""
    options: dict[str, Any] = {"train__steps": 40, "train__checkpoint_every": 5, "data__length": 24}
    straight, broken = recipe("straight", **options), recipe("broken", **options)
    metrics = Path(broken.output or "") / "metrics.jsonl"
    for lines, resume in ((7, False), (16, True)):
        child = os.fork()
        if child == 0:
            try:
                train(broken, resume=resume)
            finally:
                os._exit(1)
        while not metrics.is_file() or len(read_metrics(metrics)) < lines:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child ended by itself"
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended by itself"
    train(straight)
    train(broken, resume=True)
    assert_same_run(straight.output or "", broken.output or "")


def test_two_runs_of_one_seed_are_the_same_and_of_two_are_not(recipe: MakeRecipe) -> None:
    one, two, other = recipe("one"), recipe("two"), recipe("other", seed=4)
    for each in (one, two, other):
        train(each)
    assert_same_run(one.output or "", two.output or "")
    assert left_on_disk(one.output or "")["metrics"] != left_on_disk(other.output or "")["metrics"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "another seed (seed: 3 there, 4 in the recipe)"),
        ({"data__source": {"kind": "task", "group": "S4"}, "model__trunk__vocab_size": 24}, "another data (source: group-word S3 there"),
        ({"data__length": 13}, "another data (length: 12 there, 13 in the recipe)"),
        ({"train__batch_rows": 2}, "another batch_rows (batch_rows: 4 there, 2 in the recipe)"),
        ({"model__trunk__width": 32}, "another model (width: 16 there, 32 in the recipe)"),
        ({"model__trunk__window": 7}, "another model (window: 6 there, 7 in the recipe)"),
        ({"model__fusion": "add"}, "another model (fusion: gated there, add in the recipe)"),
    ],
)
def test_resume_with_another(recipe: MakeRecipe, change: dict[str, Any], message: str) -> None:
    trunk = {"model__trunk": {**recipe().model.trunk, "vocab_size": 24}} if "model__trunk__vocab_size" in change else {}
    stopped = recipe(train__steps=2, **trunk)
    train(stopped)
    before = left_on_disk(stopped.output or "")
    with pytest.raises(ValueError) as caught:
        train(with_changes(stopped, train__steps=4, **change), resume=True)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert left_on_disk(stopped.output or "") == before


def test_resume_with_other_text(recipe: MakeRecipe, jsonl: str) -> None:
    stopped = recipe(train__steps=2, data__source={"kind": "files", "paths": [jsonl]})
    train(stopped)
    with open(jsonl, "a", encoding="utf-8") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(ValueError, match=r"cannot resume with another data \(files: 1 files, \d+ bytes"):
        train(stopped, resume=True)


def test_existing_runs_and_missing_ones_are_refused(recipe: MakeRecipe) -> None:
    config = recipe(train__steps=1)
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        train(config, resume=True)
    assert not Path(config.output or "").exists()
    train(config)
    with pytest.raises(ValueError, match="already holds a run; continue it with --resume"):
        train(config)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_another_process_trains_is_left_alone(recipe: MakeRecipe, resume: bool) -> None:
    config = recipe()
    if resume:
        train(config)
    folder = Path(config.output or "")
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(ValueError, match="another process is at work there"):
            train(with_changes(config, train__steps=50), resume=resume)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    train(with_changes(config, train__steps=config.train.steps + 1), resume=resume)


def test_resume_of_a_finished_run_changes_nothing(recipe: MakeRecipe) -> None:
    config = recipe()
    done = train(config)
    before = left_on_disk(config.output or "")
    again = train(config, resume=True)
    assert left_on_disk(config.output or "") == before
    assert (again.steps, again.checkpoint, again.signal) == (6, done.checkpoint, None)


def test_a_finished_run_goes_on_with_more_steps(recipe: MakeRecipe) -> None:
    train(recipe(train__steps=3))
    assert train(recipe(train__steps=5), resume=True).steps == 5
    assert [entry["step"] for entry in read_metrics(Path(recipe().output or "") / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_the_kept_recipe_is_the_recipe(recipe: MakeRecipe, jsonl: str) -> None:
    config = recipe(**everything_on({"kind": "files", "paths": [jsonl], "validation_fraction": 0.2}))
    train(with_changes(config, train__steps=1))
    assert load_recipe(Path(config.output or "") / "recipe.yaml") == with_changes(config, train__steps=1)


@pytest.mark.parametrize("torn", ['{"step": 2, "passes": 2, "obj', '{"step": 1}\n{"st', "{", '{"step": 9, "objective": 1.0}\n'])
def test_a_torn_metrics_file_is_repaired(recipe: MakeRecipe, torn: str) -> None:
    straight, broken = recipe("straight"), recipe("broken", train__steps=6)
    train(straight)
    train(with_changes(broken, train__steps=2))
    with open(Path(broken.output or "") / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(torn.replace('{"step": 1}\n', ""))
    train(broken, resume=True)
    steps = [entry["step"] for entry in read_metrics(Path(broken.output or "") / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3, 4, 5]


def test_feedback_may_change_on_resume(recipe: MakeRecipe) -> None:
    """A plain run is stopped and goes on with three passes, then with two; its milestones and accounting go on too."""
    plain = recipe(feedback__schedule="none", train__steps=3)
    first = train(plain)
    second = train(with_changes(plain, feedback__schedule="three-pass", train__steps=5), resume=True)
    third = train(with_changes(plain, feedback__schedule=[{"fraction": 1.0, "passes": {2: 1.0}}], train__steps=6), resume=True)
    passes = [entry["passes"] for entry in read_metrics(Path(plain.output or "") / "metrics.jsonl")]
    assert passes == [1, 1, 1, 3, 3, 2]
    assert third.milestones.switch_on_step == 3 and third.milestones.shock == second.milestones.shock is not None
    assert [r.token_equivalent for r in (first, second, third)] == [48 * n for n in (3, 9, 11)]


def test_resume_does_not_need_the_model_it_started_from(recipe: MakeRecipe) -> None:
    start = recipe("start", train__steps=1)
    train(start)
    config = recipe(train__steps=2, train__initial_checkpoint=start.output)
    train(with_changes(config, train__steps=1))
    os.rename(start.output or "", f"{start.output}-gone")
    assert train(config, resume=True).steps == 2


@pytest.mark.parametrize("source", ["top", "mix"])
def test_a_run_that_was_saved_before_connections_goes_on(recipe: MakeRecipe, source: str) -> None:
    """Its checkpoint has other names for the fusion's weights, their optimizer state and the model's settings."""
    connection = {"fusion": "residual", "source": source}
    settings = {"feedback__connection": connection, "train__checkpoint_every": 3, "train__keep_checkpoints": 9}
    straight, older = recipe("straight", **settings), recipe("older", **settings)
    train(straight)
    train(older)
    for path in Path(older.output or "").glob("checkpoints/*"):
        if path.is_dir() and path.name != "step-00000003":
            shutil.rmtree(path)
    for name in ("last.json", "best.json"):
        (Path(older.output or "") / "checkpoints" / name).unlink(missing_ok=True)
    checkpoint = Path(older.output or "") / "checkpoints" / "step-00000003"
    for name in ("model.safetensors", "optimizer.safetensors"):
        tensors = load_file(checkpoint / name)
        renamed = {
            key.replace("connection.mergers.0.", "fusion.").replace("connection.mix", "trunk.fed_back.mix"): value
            for key, value in tensors.items()
        }
        assert renamed.keys() != tensors.keys()
        save_file(renamed, checkpoint / name)
    for name in ("config.json", "training.json"):
        raw = json.loads((checkpoint / name).read_text())
        model = raw if name == "config.json" else raw["identity"]["model"]
        model["trunk"]["fed_back"] = model.pop("connection")["source"]
        model["fusion"] = "residual"
        (checkpoint / name).write_text(json.dumps(raw))
    write_manifest(checkpoint, [path.name for path in checkpoint.iterdir() if path.name != "manifest.json"])
    train(older, resume=True)
    one, other = (load_file(Path(each.output or "") / "checkpoints/step-00000006/model.safetensors") for each in (straight, older))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
