"""What a run loses to things that go wrong around it: copies beside its checkpoints, signals that come twice, files that are edited."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullband.config import Recipe
from fullband.data.loader import TaskLoader
from fullband.files import read_tensors, verify_manifest, write_json
from fullband.run_folder import newest_checkpoint
from fullband.training import train
from fullband.training.checks import check_run_folder
from fullband.training.metrics import JsonLines, read_metrics
from fullband.training.run import DivergedError
from fullband.training.stop import stop_signals
from training.runs import StopAt, assert_same_run, last_of, with_changes

MakeRecipe = Callable[..., Recipe]


def checkpoints_of(recipe: Recipe) -> Path:
    return Path(recipe.output or "") / "checkpoints"


def test_folders_that_a_user_put_beside_checkpoints_are_not_the_runs(recipe: MakeRecipe) -> None:
    """A copy is not pruned, and is never taken for a newer checkpoint, not even where last.json is lost."""
    config = recipe(train__steps=3, train__checkpoint_every=1, train__keep_checkpoints=1)
    folder = train(config).checkpoint
    copies = [folder.with_name(name) for name in ("step-00000003-copy", "step-best", "step-00000003.bak")]
    for copy in copies:
        shutil.copytree(folder, copy)
    folder.with_name("last.json").unlink()
    assert newest_checkpoint(folder.parent) == folder
    train(with_changes(config, train__steps=5), resume=True)
    assert last_of(config.output or "").name == "step-00000005"
    assert all(copy.is_dir() for copy in copies)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path, recipe: MakeRecipe) -> None:
    """Names of more than eight digits are not in the order of the alphabet."""
    folder = train(recipe(train__steps=1)).checkpoint
    for step in (99_999_999, 100_000_000):
        shutil.copytree(folder, folder.with_name(f"step-{step:08d}"))
    folder.with_name("last.json").unlink()
    newest = newest_checkpoint(folder.parent)
    assert newest is not None and newest.name == "step-100000000"


@pytest.mark.parametrize("left", [[], ["model.safetensors", "config.json"]])
def test_a_checkpoint_that_was_half_removed_is_not_whole(recipe: MakeRecipe, left: list[str]) -> None:
    config = recipe(train__steps=2, train__checkpoint_every=1)
    folder = train(config).checkpoint
    for path in folder.iterdir():
        if path.name not in left:
            path.unlink()
    folder.with_name("last.json").unlink()
    newest = newest_checkpoint(folder.parent)
    assert newest is not None and newest.name == "step-00000001"


@pytest.mark.parametrize("name", ["optimizer.safetensors", "training.json"])
def test_a_manifest_lists_all_that_a_run_goes_on_from(recipe: MakeRecipe, name: str) -> None:
    folder = train(recipe(train__steps=1)).checkpoint
    recorded = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", {key: value for key, value in recorded.items() if key != name})
    with pytest.raises(ValueError, match=rf"manifest\.json: damaged: it does not list {name}"):
        verify_manifest(folder)


@pytest.mark.parametrize("pointer", ["../../other/checkpoints/step-00000002", ".", "..", "step-00000001-copy"])
def test_a_pointer_to_something_else_is_a_damaged_one(recipe: MakeRecipe, pointer: str) -> None:
    other, config = recipe("other", train__steps=2), recipe(train__steps=2, train__checkpoint_every=1)
    train(other)
    folder = train(config).checkpoint
    shutil.copytree(folder, folder.with_name("step-00000001-copy"))
    write_json(folder.with_name("last.json"), {"checkpoint": pointer})
    assert last_of(config.output or "") == folder


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_comes_twice_is_one_request(number: int) -> None:
    """A closed terminal sends SIGHUP and so does its shell; schedulers repeat SIGTERM. Only a second Ctrl-C is impatience."""
    with stop_signals() as stop:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.signal == number
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal == number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_parameters_that_are_no_numbers_replace_no_checkpoint(recipe: MakeRecipe) -> None:
    """The update of a step that is saved overflowed: keeping one checkpoint must not mean keeping that one."""
    config = recipe(train__checkpoint_every=1, train__keep_checkpoints=1)

    class Overflow(StopAt):
        def stepped(self, run: Any, values: dict[str, Any]) -> None:
            if run.step == self.step:
                with torch.no_grad():
                    run.model.trunk.blocks[0].glu.up.weight[0, 0] = float("nan")

    with pytest.raises(DivergedError, match=r"^step 3: the update .*the last good state is .*step-00000002"):
        train(config, watcher=Overflow(3))
    tensors = read_tensors(last_of(config.output or "") / "model.safetensors")
    assert last_of(config.output or "").name == "step-00000002" and all(bool(t.isfinite().all()) for t in tensors.values())
    straight = recipe("straight", train__checkpoint_every=1, train__keep_checkpoints=1)
    train(straight)
    train(config, resume=True)
    assert_same_run(straight.output or "", config.output or "")


@pytest.mark.parametrize("what", ["file", "dangling link"])
def test_checkpoints_that_cannot_be_written_are_found_before_the_first_step(recipe: MakeRecipe, what: str) -> None:
    config = recipe()
    folder = checkpoints_of(config)
    folder.parent.mkdir()
    folder.write_text("") if what == "file" else folder.symlink_to("/nowhere/at/all")

    steps = StopAt(99)
    steps.stepped = lambda run, values: pytest.fail("a step was done")  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="checkpoints: "):
        train(config, watcher=steps)


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_validation_that_failed_is_done_again(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Twice it fails, and the run is still the straight one: metrics, pointers and all."""
    config = recipe(train__steps=4, train__checkpoint_every=2, evaluation={"every": step, "rows": 2, "feedback_passes": [0, 1]})
    straight = with_changes(config, output=f"{config.output}-straight")
    train(straight)

    def fails(*_: Any) -> dict[str, float]:
        raise ValueError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr("fullband.training.loop.validation_losses", fails)
        for resume in (False, True):
            with pytest.raises(ValueError, match="no such thing"):
                train(config, resume=resume)
    result = train(config, resume=True)
    assert result.validation
    one, other = (read_metrics(Path(r.output or "") / "metrics.jsonl") for r in (straight, config))
    for entry in (*one, *other):
        entry.pop("tokens_per_second", None)
    assert one == other
    pointers = [json.loads((checkpoints_of(r) / "last.json").read_text()) for r in (straight, config)]
    assert pointers[0] == pointers[1]


def test_data_are_known_before_the_first_step(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are gone at the first save must not make it impossible."""
    done = False
    real = TaskLoader.fingerprint

    def gone(self: TaskLoader) -> dict[str, str]:
        if done:
            raise ValueError("data.jsonl: no such file")
        return real(self)

    class Watch(StopAt):
        def stepped(self, run: Any, values: dict[str, Any]) -> None:
            nonlocal done
            done = True

    monkeypatch.setattr(TaskLoader, "fingerprint", gone)
    assert train(recipe(train__steps=2), watcher=Watch(99)).checkpoint.name == "step-00000002"


def test_metrics_that_cannot_be_written_lose_no_step(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    config, straight = recipe(train__steps=5), recipe("straight", train__steps=5)
    train(straight)
    log = JsonLines.log

    def full(self: JsonLines, step: int, values: dict[str, Any]) -> None:
        if step == 2:
            raise ValueError("metrics.jsonl: cannot be written (No space left on device)")
        log(self, step, values)

    with monkeypatch.context() as patched:
        patched.setattr(JsonLines, "log", full)
        with pytest.raises(ValueError, match=r"cannot be written .*training up to step 3 is kept in .*step-00000003"):
            train(config)
    train(config, resume=True)
    assert (last_of(config.output or "") / "model.safetensors").read_bytes() == (
        last_of(straight.output or "") / "model.safetensors"
    ).read_bytes()


def test_a_run_that_is_longer_than_its_recipe_is_refused(recipe: MakeRecipe) -> None:
    config = recipe(train__steps=4)
    train(config)
    kept = (Path(config.output or "") / "recipe.yaml").read_bytes()
    with pytest.raises(ValueError, match=r"train\.steps: .* 4 steps .* 2"):
        train(with_changes(config, train__steps=2), resume=True)
    assert (Path(config.output or "") / "recipe.yaml").read_bytes() == kept


def test_a_name_that_no_file_can_have_is_refused_by_a_dry_run_too() -> None:
    with pytest.raises(ValueError, match=r"output: .*NUL"):
        check_run_folder(Path("a\0b"))
