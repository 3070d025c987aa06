"""The quickstart end to end, in miniature, and what it may delete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from fullband.model import FullBandModel
from fullband.quickstart.demonstration import clear
from fullband.quickstart.recipes import fullband_recipe
from fullband.quickstart.training import train_all

READINGS = ["standard", "fused-0", "fused-1", "fused-2", "fused-4", "fused-8", "fused-16", "exact"]


def test_result_json_has_the_promised_shape(miniature) -> None:
    result = json.loads((miniature.output / "result.json").read_text())
    assert result == json.loads(json.dumps(miniature.result))
    assert result["seed"] == 3
    assert result["chance"] == pytest.approx(1 / 6)
    assert result["seconds"] > 0
    assert set(result["token_equivalent_compute"]) == {"standard", "fullband"}
    assert result["token_equivalent_compute"]["standard"] == result["token_equivalent_compute"]["fullband"] > 0
    for table in (result["accuracy"], result["stderr"]):
        assert list(table) == READINGS
        for by_position in table.values():
            assert list(by_position) == ["8", "16", "32", "64"]
            assert all(0 <= value <= 1 for value in by_position.values())
    assert all(len(by_position) == 64 for by_position in result["accuracy_by_position"].values())


def test_both_runs_are_complete_and_load(miniature) -> None:
    for name in ("standard", "fullband"):
        run = miniature.result["training"][name]
        FullBandModel.load(miniature.output / name)
        assert run["token_equivalent"] == miniature.result["token_equivalent_compute"][name]
        assert run["tokens"] <= run["executed_positions"] <= run["token_equivalent"]
        assert run["executed_flops"] > 0
    assert miniature.result["milestones"]["switch_on_step"] == 2  # a quarter of eight steps is plain


def test_everything_is_written_and_said(miniature) -> None:
    for name in ("report.html", "accuracy.png", "accuracy.svg", "curves.png"):
        assert (miniature.output / name).stat().st_size > 5000
    for words in (
        "standard model",
        "full-band, 16 feedback passes",
        "full-band, exact",
        "chance 0.17",
        "seed 3",
        "tokens × passes",
        "Try next: fullband",
    ):
        assert words in miniature.printed


def test_a_second_run_replaces_the_first_and_nothing_else(miniature) -> None:
    assert not list(miniature.output.glob("*/checkpoints/step-00000099"))  # the remains it found
    assert (miniature.output / "notes.txt").read_text() == "mine"


def remains(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"name: quickstart-{folder.name}\n")
    return folder


def test_clear_removes_an_unfinished_run_and_old_results(tmp_path: Path) -> None:
    remains(tmp_path / "fullband")
    (tmp_path / "result.json").write_text("{}")
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["another file", "another run", "no run", "a file", "a link"])
def test_a_folder_that_is_not_ours_is_left_alone(case: str, tmp_path: Path) -> None:
    other, foreign = remains(tmp_path / "standard"), tmp_path / "fullband"
    if case == "a file":
        foreign.write_text("mine")
    elif case == "a link":
        foreign.symlink_to(remains(tmp_path / "elsewhere" / "fullband"))
    elif case == "another file":
        (remains(foreign) / "thesis.tex").write_text("mine")
    else:
        foreign.mkdir()
        (foreign / "metrics.jsonl").write_text("")
        if case == "another run":
            (foreign / "recipe.yaml").write_text("name: tiny-text\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"fullband: .*(it would be replaced; move it, or choose another output folder)"):
        clear(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert other.is_dir()


def test_an_output_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write the output folder"):
        clear(tmp_path / "file" / "quickstart")


def test_what_a_training_process_refuses_is_raised_here(tmp_path: Path) -> None:
    recipe = fullband_recipe(0, tmp_path, ["data.length=500", "train.steps=4"])  # longer than the context
    with pytest.raises(
        ValueError, match=r"quickstart-fullband: data\.length: must be at most the model's context of .*, got 500"
    ) as caught:
        train_all([recipe], Console(quiet=True), cores=1)
    assert "\n" not in str(caught.value)
