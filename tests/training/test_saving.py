"""Checkpoints: killed at every moment of a save, on a full disk, pruned; the one before is always whole."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullband.config import Recipe
from fullband.data.batch import Batch
from fullband.data.loader import TaskLoader
from fullband.files import LOCK, write_manifest
from fullband.model import FullBandModel
from fullband.training import train
from fullband.training.checkpoint import Checkpoints
from fullband.training.loop import own_folder
from training.runs import assert_same_run, in_child, kill_self, last_of, needs_fork, on_file_change, with_changes

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def saving(recipe: MakeRecipe) -> Callable[[str], Recipe]:
    """Four quick steps with two saves, of which the second is the better one and takes the place of the first."""

    def make(output: str) -> Recipe:
        return recipe(
            output,
            data__length=4,
            feedback__schedule="none",
            optim={"warmup_steps": 0, "matrix_lr": 0.05, "adam_lr": 0.005},
            train={"steps": 4, "batch_rows": 16, "checkpoint_every": 2, "keep_checkpoints": 1, "log_every": 1, "device": "cpu"},
            evaluation={"every": 2, "rows": 8, "feedback_passes": [0]},
        )

    return make


def finish(recipe: Recipe) -> None:
    """What a user does after a crash: resume, or start again where nothing had been saved."""
    folder = Path(recipe.output or "")
    last = Checkpoints(folder / "checkpoints").last()
    if last:
        FullBandModel.load(folder)  # reads and verifies the checkpoint that last.json points to
    train(recipe, resume=last is not None)


def changes_of(work: Callable[[], Any], tmp_path: Path, only: tuple[str, ...] = ()) -> int:
    """How often `work` changes the file system."""
    counted = tmp_path / "changes"

    def count() -> None:
        changes = on_file_change(0, kill_self, only)
        work()
        counted.write_text(str(changes()), encoding="utf-8")

    assert in_child(count).error == ""
    return int(counted.read_text(encoding="utf-8"))


@needs_fork
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_every_change_of_the_disk(saving: Callable[[str], Recipe], tmp_path: Path, every: int) -> None:
    straight, broken = saving("straight"), saving("broken")
    train(straight)
    assert [p.name for p in (Path(straight.output or "") / "checkpoints").iterdir() if p.is_dir()] == ["step-00000004"]
    changes = changes_of(lambda: train(saving("counted")), tmp_path)
    assert changes > 40  # two saves of five files, pointers, metrics, the recipe
    for number in range(1, changes + 1, every):
        shutil.rmtree(broken.output or "", ignore_errors=True)

        def killed(number: int = number) -> None:
            on_file_change(number, kill_self)
            train(broken)

        assert in_child(killed).signal == signal.SIGKILL
        for whole in Path(broken.output or "").glob("checkpoints/step-*"):
            FullBandModel.load(whole)
        finish(broken)
        assert_same_run(straight.output or "", broken.output or "")
        assert [path.name for path in Path(broken.output or "").rglob(".*")] in ([], [LOCK])  # no half-written file


@pytest.mark.slow
@needs_fork
def test_killed_again_while_finishing(saving: Callable[[str], Recipe], tmp_path: Path) -> None:
    """The second save is cut short, and so is the one that comes to the same step after resuming."""
    straight, cut, broken = saving("straight"), saving("cut"), saving("broken")
    train(straight)
    train(with_changes(cut, train__steps=2))
    changes = changes_of(lambda: (shutil.copytree(cut.output or "", tmp_path / "counted"), finish(saving("counted"))), tmp_path)
    for first in range(changes - 8, changes + 1, 2):  # around the rename, the pointers, the pruning
        for second in range(changes - 12, changes + 1, 5):
            shutil.rmtree(broken.output or "", ignore_errors=True)
            shutil.copytree(cut.output or "", broken.output or "")
            for number in (first, second):

                def killed(number: int = number) -> None:
                    on_file_change(number, kill_self)
                    finish(broken)

                in_child(killed)
            finish(broken)
            assert_metrics_end(broken, 3)
            assert last_of(broken.output or "").name == "step-00000004"
            assert file_bytes(broken) == file_bytes(straight)


def file_bytes(recipe: Recipe) -> dict[str, bytes]:
    folder = last_of(recipe.output or "")
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def assert_metrics_end(recipe: Recipe, step: int) -> None:
    lines = (Path(recipe.output or "") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["step"] == step


@needs_fork
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_disk_full_at_every_change(saving: Callable[[str], Recipe], tmp_path: Path, every: int) -> None:
    """Opening, renaming or making a folder fails once: one clear line, no litter, and the run can go on."""
    kinds = ("open", "os.rename", "os.mkdir")

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    straight, broken = saving("straight"), saving("broken")
    train(straight)
    changes = changes_of(lambda: train(saving("counted")), tmp_path, kinds)
    for number in [*range(1, changes // 2, 3), *range(changes // 2, changes + 1)][::every]:  # the second save in full
        shutil.rmtree(broken.output or "", ignore_errors=True)

        def on_a_full_disk(number: int = number) -> None:
            on_file_change(number, full, kinds)
            train(broken)

        end = in_child(on_a_full_disk)
        if end.error:
            assert end.error.startswith("ValueError: ") and "No space left on device" in end.error, (number, end.error)
            assert str(broken.output) in end.error and "\n" not in end.error
        else:  # pruning could not: that can wait
            assert last_of(broken.output or "").name == "step-00000004"
        assert not list(Path(broken.output or "").rglob("*.partial"))
        finish(broken)
        assert_same_run(straight.output or "", broken.output or "")


@needs_fork
@pytest.mark.parametrize("limit", [300, 3000, 9000, 12000])
def test_a_write_that_stops_half_way(saving: Callable[[str], Recipe], limit: int) -> None:
    """The kernel refuses every byte behind `limit`: in the weights, in the optimizer's state. First as an error, then as a kill."""
    straight, broken = saving("straight"), saving("broken")
    train(straight)
    train(with_changes(broken, train__steps=2))
    sizes = [p.stat().st_size for p in last_of(straight.output or "").iterdir()]
    assert max(sizes) > 12000

    def limited(at_the_limit: Any) -> None:
        signal.signal(signal.SIGXFSZ, at_the_limit)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        train(broken, resume=True)

    end = in_child(lambda: limited(signal.SIG_IGN))
    assert end.error.startswith("ValueError: ") and str(broken.output) in end.error and "File too large" in end.error
    assert in_child(lambda: limited(signal.SIG_DFL)).signal == signal.SIGXFSZ
    assert last_of(broken.output or "").name == "step-00000002"
    finish(broken)
    assert_same_run(straight.output or "", broken.output or "")


def test_a_save_that_was_cut_short_is_replaced_not_trusted(recipe: MakeRecipe) -> None:
    """Killed between a checkpoint's rename and last.json, then resumed with another schedule: the old step 4 is not the new one."""
    config = recipe(train__steps=4, train__checkpoint_every=2)
    train(config)
    checkpoints = Path(config.output or "") / "checkpoints"
    (checkpoints / "last.json").write_text('{"checkpoint": "step-00000002"}', encoding="utf-8")
    old = (checkpoints / "step-00000004" / "model.safetensors").read_bytes()
    changed = with_changes(config, feedback__schedule="three-pass")
    train(changed, resume=True)
    assert (checkpoints / "step-00000004" / "model.safetensors").read_bytes() != old
    straight = with_changes(config, output=f"{config.output}-straight")
    train(with_changes(straight, train__steps=2))
    # the plain stop at 2 had a cooldown of its own: bring the same recipe to 4 from the same checkpoint
    shutil.rmtree(Path(straight.output or "") / "checkpoints")
    shutil.copytree(checkpoints / "step-00000002", Path(straight.output or "") / "checkpoints" / "step-00000002")
    (Path(straight.output or "") / "checkpoints" / "last.json").write_text('{"checkpoint": "step-00000002"}', encoding="utf-8")
    train(with_changes(straight, feedback__schedule="three-pass"), resume=True)
    assert file_bytes(straight) == file_bytes(changed)


def test_pruning_never_takes_the_checkpoint_to_resume_from(recipe: MakeRecipe) -> None:
    """A newer folder left by a save that was cut short is not counted among the newest, and goes."""
    config = recipe(train__steps=6, train__checkpoint_every=2, train__keep_checkpoints=1)
    train(with_changes(config, train__steps=2))
    checkpoints = Path(config.output or "") / "checkpoints"
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000008")
    train(with_changes(config, train__steps=4), resume=True)
    assert sorted(p.name for p in checkpoints.glob("step-*")) == ["step-00000004"]
    assert train(config, resume=True).steps == 6


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_best_last_and_the_newest_are_kept(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    losses = iter([3.0, 1.0, float("nan"), 2.0, 1.5, 1.0])
    monkeypatch.setattr("fullband.training.loop.validation_losses", lambda *_: {"0": (loss := next(losses)), "1": loss + 1})
    config = recipe(train__steps=6, train__checkpoint_every=1, train__keep_checkpoints=keep, evaluation={"every": 1, "rows": 1})
    train(config)
    checkpoints = Checkpoints(Path(config.output or "") / "checkpoints")
    kept = sorted(int(p.name[5:]) for p in checkpoints.folder.glob("step-*"))
    assert kept == sorted({2, *range(7 - keep, 7)})
    assert checkpoints.best() == (checkpoints.folder / "step-00000002", 1.0)
    assert checkpoints.last() == checkpoints.folder / "step-00000006"


def test_the_best_is_remembered_over_a_resume(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a kill cut short is not: a best.json that was written before the kill claims a checkpoint that is about to change."""
    losses = iter([1.0, 2.0, 3.0, 0.5, 4.0, 5.0])
    monkeypatch.setattr("fullband.training.loop.validation_losses", lambda *_: {"0": next(losses)})
    config = recipe(train__steps=3, train__checkpoint_every=1, train__keep_checkpoints=1, evaluation={"every": 1, "rows": 1})
    checkpoints = Checkpoints(Path(config.output or "") / "checkpoints")
    train(with_changes(config, train__steps=2))
    train(config, resume=True)
    assert checkpoints.best() == (checkpoints.folder / "step-00000001", 1.0)
    train(with_changes(config, train__steps=4), resume=True)
    assert checkpoints.best() == (checkpoints.folder / "step-00000004", 0.5)
    (checkpoints.folder / "last.json").unlink()  # whether the newest was the best, nothing says any more: it is validated again
    with pytest.raises(ValueError, match="already holds a run; continue it with --resume"):
        train(config)
    train(with_changes(config, train__steps=4), resume=True)
    assert checkpoints.best() == (checkpoints.folder / "step-00000004", 4.0)
    assert [p.name for p in checkpoints.folder.glob("step-*")] == ["step-00000004"]


@pytest.mark.parametrize("first", [float("nan"), float("inf")])
def test_a_validation_loss_that_is_no_number_is_never_the_best(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, first: float) -> None:
    losses = iter([{"0": first, "1": first}, {"0": float("nan"), "1": 5.0}])
    monkeypatch.setattr("fullband.training.loop.validation_losses", lambda *_: next(losses))
    config = recipe(train__steps=2, train__checkpoint_every=1, evaluation={"every": 1, "rows": 1})
    train(config)
    best = Checkpoints(Path(config.output or "") / "checkpoints").best()
    assert best is not None and (best[0].name, best[1]) == ("step-00000002", 5.0)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training.json", "tokenizer_config.json", "config.json"])
def test_a_flipped_bit_is_found_and_named(recipe: MakeRecipe, name: str) -> None:
    config = recipe(train__steps=1)
    folder = train(config).checkpoint
    path = folder / name
    if not path.is_file():  # the tokenizer's file has a name of its own
        (path,) = (
            set(folder.iterdir())
            - {folder / n for n in ("model.safetensors", "optimizer.safetensors", "training.json")}
            - {
                folder / "config.json",
                folder / "manifest.json",
            }
        )
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name}: damaged"):
        train(with_changes(config, train__steps=2), resume=True)


@pytest.mark.parametrize("content", [None, '{"check', "[]", '{"checkpoint": 3}', '{"checkpoint": "step-00000009"}', "[" * 100_000])
def test_without_its_pointer_a_run_goes_on_from_the_newest_whole_checkpoint(recipe: MakeRecipe, content: str | None) -> None:
    """Nothing that is there is trained over: a fresh run is refused, and a resumed one ends as it would have."""
    straight, config = recipe("straight", train__checkpoint_every=2), recipe(train__checkpoint_every=2)
    train(straight)
    train(with_changes(config, train__steps=4))
    pointer = Path(config.output or "") / "checkpoints" / "last.json"
    pointer.unlink() if content is None else pointer.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="already holds a run; continue it with --resume"):
        train(config)
    assert train(config, resume=True).steps == 6
    assert file_bytes(config).keys() == file_bytes(straight).keys()


def test_a_damaged_checkpoint_offers_the_newest_whole_one(recipe: MakeRecipe) -> None:
    config = recipe(train__checkpoint_every=2)
    train(config)
    newest, older = (Path(config.output or "") / "checkpoints" / f"step-0000000{step}" for step in (6, 4))
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-5] ^= 4
    (newest / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.safetensors: damaged.*; step-00000004 is whole: to go on from it, remove {newest}"):
        train(config, resume=True)
    with pytest.raises(ValueError, match="already holds a run"):
        train(config)
    shutil.rmtree(newest)
    result = train(config, resume=True)
    assert result.steps == 6 and older.is_dir()
    for place in (newest, older):
        (place / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"manifest\.json: missing"):
        train(config, resume=True)
    (newest.parent / "last.json").unlink()
    for resume in (True, False):
        with pytest.raises(ValueError, match="none of its checkpoints is whole"):
            train(config, resume=resume)


@pytest.mark.parametrize("missing", ["training.json", "model.safetensors", "manifest.json"])
def test_a_missing_file_is_named(recipe: MakeRecipe, missing: str) -> None:
    config = recipe(train__steps=1)
    folder = train(config).checkpoint
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=f"{folder}.*{missing}"):
        train(config, resume=True)


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"step": "x"}', "[" * 100_000])
def test_training_state_of_another_shape_is_named(recipe: MakeRecipe, content: str) -> None:
    config = recipe(train__steps=1)
    folder = train(config).checkpoint
    (folder / "training.json").write_text(content, encoding="utf-8")
    write_manifest(folder, [path.name for path in folder.iterdir() if path.name != "manifest.json"])
    with pytest.raises(ValueError, match=r"training\.json: (not the training state of a run|damaged)"):
        train(config, resume=True)


@pytest.mark.parametrize(("section", "value"), [("loader", {}), ("loader", {"example": None}), ("schedule", []), ("milestones", {"of": 1})])
def test_a_section_of_another_shape_is_named(recipe: MakeRecipe, section: str, value: Any) -> None:
    config = recipe(train__steps=1)
    folder = train(config).checkpoint
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    (folder / "training.json").write_text(json.dumps(training | {section: value}), encoding="utf-8")
    write_manifest(folder, [path.name for path in folder.iterdir() if path.name != "manifest.json"])
    with pytest.raises(ValueError, match=r"training\.json: not the training state of a run"):
        train(config, resume=True)


@pytest.mark.parametrize("manifest", [{}, {"config.json": ""}])
def test_a_manifest_that_lists_no_weights_is_damaged(recipe: MakeRecipe, manifest: dict[str, str]) -> None:
    config = recipe(train__steps=1)
    folder = train(config).checkpoint
    recorded = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({name: recorded[name] for name in manifest}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"manifest\.json: damaged: it does not list model\.safetensors"):
        FullBandModel.load(folder)


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_validation_that_fails_loses_nothing(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """At a step that is saved, at one that is not, and at the last: the state is kept, and the run goes on from there."""
    config = recipe(train__steps=4, train__checkpoint_every=2, evaluation={"every": step, "rows": 2, "feedback_passes": [0, 1]})
    straight = with_changes(config, output=f"{config.output}-straight")
    train(straight)

    def fails(*_: Any) -> dict[str, float]:
        raise ValueError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr("fullband.training.loop.validation_losses", fails)
        with pytest.raises(ValueError, match=rf"no such thing; training up to step {step} is kept in .*step-0000000{step}"):
            train(config)
    train(config, resume=True)
    assert file_bytes(config) == file_bytes(straight)


def test_data_that_vanish_lose_nothing(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    config, straight = recipe(train__steps=5), recipe("straight", train__steps=5)
    train(straight)
    batches = TaskLoader.next_batch
    calls = iter(range(100))

    def vanishing(self: TaskLoader) -> Batch:
        batch = batches(self)
        if next(calls) == 3:
            raise ValueError("data.jsonl: no such file")
        return batch

    with monkeypatch.context() as patched:
        patched.setattr(TaskLoader, "next_batch", vanishing)
        with pytest.raises(ValueError, match=r"data\.jsonl: no such file; training up to step 3 is kept in .*step-00000003"):
            train(config)
    train(config, resume=True)
    assert file_bytes(config) == file_bytes(straight)


def test_two_runs_of_a_fresh_folder(recipe: MakeRecipe) -> None:
    """The second is refused before it writes anything, and a refused one leaves no folder."""
    config, other = recipe("a/b/run"), recipe("a/b/run", seed=4)
    with own_folder(config.folder), pytest.raises(ValueError, match="another process is at work there"):
        train(other)
    assert not (config.folder.parents[1]).exists()
    with pytest.raises(ValueError, match=r"data\.length"):
        train(with_changes(config, data__length=65))
    assert not (config.folder.parents[1]).exists()


def test_a_folder_that_cannot_be_written_is_named(recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="file/run: cannot write the run folder"):
        train(recipe("file/run"))
