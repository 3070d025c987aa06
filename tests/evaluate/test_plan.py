"""Evaluation folders: whose answers they hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fullband.evaluate.plan import EvaluationPlan, check_folder, files_hash, start, weights_hash

PLAN = EvaluationPlan(tasks=("piqa",))
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "modeling_x.py")


def about(folder: Path) -> dict[str, str | None]:
    return {"name": "m", "weights": weights_hash(folder), "files": files_hash(folder)}


@pytest.mark.parametrize(
    ("name", "named"), [*((name, "files") for name in FILES), ("model.safetensors", "weights"), ("new.jinja", "files")]
)
def test_a_model_whose_files_changed_is_another_one(tmp_path: Path, name: str, named: str) -> None:
    """Also where size and time stay."""
    model, folder = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    for one in (*FILES, "model.safetensors"):
        (model / one).write_text("{}")
    start(folder, PLAN, about(model), {})
    assert check_folder(folder, PLAN, about(model))
    times = (model / name).stat() if (model / name).exists() else None
    (model / name).write_text("[]")
    if times:
        os.utime(model / name, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ValueError, match=rf"holds an evaluation with another model \({named}\); choose another --output"):
        check_folder(folder, PLAN, about(model))


def test_a_snapshot_of_the_hub_is_known_by_its_commit(tmp_path: Path) -> None:
    folders = [tmp_path / "snapshots" / commit for commit in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
    assert files_hash(folders[0]) != files_hash(folders[1])


def test_a_plan_that_does_not_say_which_files(tmp_path: Path) -> None:
    start(tmp_path, PLAN, {"name": "m"})
    with pytest.raises(ValueError, match="does not name the model files of its answers; choose another --output"):
        check_folder(tmp_path, PLAN, {"name": "m", "files": "0"})


def test_other_data_or_prompts_sum_up_anew(tmp_path: Path) -> None:
    start(tmp_path, PLAN, {}, {"piqa": {"data": "a", "prompts": "b"}})
    names = ("tasks", "documents", "scores", "rollouts")
    for name in names:
        (tmp_path / f"{name}.jsonl").touch()
    start(tmp_path, PLAN, {}, {"piqa": {"data": "a", "prompts": "b"}})
    assert all((tmp_path / f"{name}.jsonl").exists() for name in names)
    start(tmp_path, PLAN, {}, {"piqa": {"data": "a", "prompts": "c"}})
    assert [(tmp_path / f"{name}.jsonl").exists() for name in names] == [False, False, True, True]
