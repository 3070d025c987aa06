"""Recipes by name, by run folder and in any folder; what the wheel brings along; paths under ~."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from cli.commands import Trained, fullband, refused
from cli.conftest import task_run  # noqa: F401  a fixture
from fullband.config import load_recipe
from fullband.data.tokenizers import load_tokenizer
from fullband.experiments import find_experiment, list_experiments, load_experiment
from fullband.shipped import find_recipe, shipped_recipes

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "empty"


@pytest.mark.parametrize("name", ["tiny-text", "tiny-text.yaml", "recipes/tiny-text.yaml", "recipes/tiny-text"])
def test_a_shipped_recipe_in_any_folder(name: str) -> None:
    assert find_recipe(name) == shipped_recipes() / "tiny-text.yaml"
    assert load_recipe(name).name == "tiny-text"


def test_ones_own_file_comes_first(elsewhere: Path) -> None:
    (elsewhere / "recipes").mkdir()
    (elsewhere / "recipes" / "tiny-text.yaml").write_text("name: mine\n")
    (elsewhere / "tiny-sft").write_text("name: mine too\n")
    assert find_recipe("recipes/tiny-text.yaml") == Path("recipes/tiny-text.yaml") and find_recipe("tiny-sft") == Path("tiny-sft")
    assert find_recipe("tiny-text") == shipped_recipes() / "tiny-text.yaml"


def test_a_name_that_is_none() -> None:
    assert refused("train", "tiny-txt") == "error: tiny-txt: no such recipe file; did you mean 'tiny-text'?"
    for name in ("../tiny-text", "/tiny-text.yaml", "", "experiments"):
        with pytest.raises(ValueError):
            find_recipe(name)


def test_experiments_in_any_folder() -> None:
    assert {path.stem for path in list_experiments()} >= {"s3", "schedule-text"}
    assert load_experiment(find_experiment("s3")).name == "s3"
    assert "not begun" in fullband("experiment", "s3", "--dry-run", "--seeds", "0").out
    assert fullband("info", "s3").out.startswith("s3: ")


def test_the_wheel_brings_the_recipes_and_clean_keeps_the_runs() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"recipes": "fullband/recipes"}
    clean = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nclean:")[2].splitlines()
    assert [line.split() for line in clean if line.startswith("\t")] == [["rm", "-rf", ".venv"]]


def test_every_command_takes_a_run_folder(task_run: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    moved = tmp_path / "moved run"
    shutil.copytree(task_run.folder, moved)
    recipe = load_recipe(moved)
    assert recipe.output == str(moved) and recipe.name == load_recipe(task_run.recipe).name
    assert "already holds a run" in refused("train", moved)
    assert "complete: nothing left to do" in fullband("train", moved, "--resume").err
    done = fullband("train", moved, "--dry-run", "--json")
    assert done.json["run"]["folder"] == str(moved)
    assert load_tokenizer(moved).name == load_tokenizer(newest(moved)).name
    done = fullband("evaluate-loss", moved, "--recipe", moved, "--documents", "2")
    assert done.code == 0, done.err
    assert "a folder without a recipe.yaml" in refused("train", tmp_path)


def newest(run: Path) -> Path:
    return run / "checkpoints" / json.loads((run / "checkpoints" / "last.json").read_text())["checkpoint"]


def test_the_home_folder_where_the_shell_leaves_it(task_run: Trained, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("HOME", str(task_run.folder.parent))
    assert fullband("info", "~/run", "--json").json["folder"].startswith(str(task_run.folder))
    assert fullband("generate", "~/run", "0 1", "--max-new-tokens", "1").code == 0
    assert fullband("compare-runs", "~/run", "--json").code == 0
    assert load_recipe("~/recipe.yaml", ["output=~/other"]).output == str(task_run.folder.parent / "other")
