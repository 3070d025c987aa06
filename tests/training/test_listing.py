"""How runs stand, from their folders, whatever has become of them; and what starts.jsonl says of each start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.commands import fullband, refused
from fullband.config import Recipe
from fullband.files import alone_in
from fullband.training import starts, train
from fullband.training.listing import runs_in, standing
from fullband.training.starts import STARTS, read_starts
from training.test_stopping import At, send

MakeRecipe = Callable[..., Recipe]


def folder_of(recipe: Recipe) -> Path:
    return Path(recipe.output or "")


def test_a_complete_run(recipe: MakeRecipe) -> None:
    made = recipe(evaluation__rows=4)
    train(made)
    found = standing(folder_of(made))
    assert (found.state, found.steps, found.of, found.seconds_left) == ("complete", 6, 6, None)
    assert found.losses is not None and list(found.losses) == ["1", "2"] and found.validation and found.tokens_per_second
    started, ended = read_starts(folder_of(made))
    assert started["seed"] == 3 and started["versions"]["torch"] and started["data"]["source"] and started["process"] == os.getpid()
    assert (ended["step"], ended["how"]) == (6, "complete")


def test_a_run_that_was_stopped_and_one_that_goes_on(recipe: MakeRecipe) -> None:
    made = recipe()
    train(made, watcher=At(2, send(signal.SIGTERM)))
    found = standing(folder_of(made))
    assert (found.state, found.note, found.steps) == ("stopped", "by SIGTERM", 2)
    with alone_in(folder_of(made)):
        assert standing(folder_of(made)).state == "running"
    train(made, resume=True)
    assert standing(folder_of(made)).state == "complete"
    assert [entry["event"] for entry in read_starts(folder_of(made))] == ["started", "ended"] * 2
    assert read_starts(folder_of(made))[2]["step"] == 2


def test_a_run_that_failed_says_why(recipe: MakeRecipe) -> None:
    made = recipe()

    def fails(run: Any) -> None:
        raise RuntimeError("out of luck\nand of lines")

    with pytest.raises(RuntimeError):
        train(made, watcher=At(3, fails))
    found = standing(folder_of(made))
    assert (found.state, found.note) == ("failed", "out of luck")


def test_a_killed_run(recipe: MakeRecipe) -> None:
    """Its start has no end, its folder no lock."""
    made = recipe()
    train(made, watcher=At(2, send(signal.SIGTERM)))
    path = folder_of(made) / STARTS
    path.write_text(path.read_text().splitlines()[0] + '\n{"at": "2026', encoding="utf-8")
    assert standing(folder_of(made)).state == "killed"
    path.unlink()
    assert standing(folder_of(made)).state == "stopped", "an older version did not say"


def test_the_time_left_counts_passes(recipe: MakeRecipe) -> None:
    schedule = [{"fraction": 0.5, "passes": {1: 1.0}}, {"fraction": 0.5, "passes": {3: 1.0}}]
    made = recipe(feedback__schedule=schedule, train__steps=8)
    folder = folder_of(made)
    left: list[float] = []

    def look(run: Any) -> None:
        entries = [json.loads(line) for line in (folder / STARTS).read_text().splitlines()]
        entries[0]["at"] = "2026-01-01T00:00:00+00:00"
        (folder / STARTS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        os.utime(folder / "metrics.jsonl", (1767225600 + 30, 1767225600 + 30))  # 30 seconds later
        left.append(_left(folder, made))

    train(made, watcher=At(4, look))
    # Three steps of one pass are logged when the watcher sees the fourth, in 30 s. Left: one more, and four with two more passes.
    assert 30 / 3 * (1 + 4) < left[0] <= 30 / 3 * (1 + 4 * 3)


def _left(folder: Path, recipe: Recipe) -> float:
    from fullband.training.listing import _left as seconds_left

    found = seconds_left(folder, recipe, read_starts(folder)[-1], 3)
    assert found is not None
    return found


def test_damage_is_said_not_raised(recipe: MakeRecipe, tmp_path: Path) -> None:
    made = recipe()
    train(made)
    (folder_of(made) / "recipe.yaml").write_text("name: [", encoding="utf-8")
    assert standing(folder_of(made)).state == "damaged"
    (folder_of(made) / STARTS).write_bytes(b"\xff\x00[1]\n")
    assert read_starts(folder_of(made)) == []


def test_a_full_disk_stops_no_run(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    real = open

    def full(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(STARTS):
            raise OSError(28, "No space left on device")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(starts, "open", full, raising=False)
    made = recipe()
    assert train(made).steps == 6
    assert not (folder_of(made) / STARTS).exists() and standing(folder_of(made)).state == "complete"


def test_the_commit_is_that_of_a_checkout_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "src" / "starts.py"
    place.parent.mkdir()
    place.write_text("x = 1\n")
    monkeypatch.setattr(starts, "__file__", str(place))
    assert starts._commit() is None, "no checkout"

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    git("init")
    assert starts._commit() is None, "another project's"
    git("add", ".")
    git("commit", "-m", "x")
    commit = starts._commit()
    assert commit is not None and len(commit) == 40
    place.write_text("x = 2\n")
    assert starts._commit() == commit + "+"


def test_the_command_lists_what_lies_below(recipe: MakeRecipe, tmp_path: Path) -> None:
    for name in ("runs/a", "runs/deep/b"):
        train(recipe(name))
    (tmp_path / "runs" / "other").mkdir()
    assert runs_in([tmp_path / "runs", tmp_path / "runs" / "a"]) == [tmp_path / "runs" / "a", tmp_path / "runs" / "deep" / "b"]
    listed = fullband("runs", tmp_path / "runs", "--json").json["runs"]
    assert [(run["state"], run["steps"]) for run in listed] == [("complete", 6)] * 2
    assert "6 of 6" in fullband("runs", tmp_path / "runs").out
    assert "no such folder" in refused("runs", tmp_path / "nowhere")
    assert "no run is here" in refused("runs", tmp_path / "runs" / "other")
