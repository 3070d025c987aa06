"""What the commands do when all is well, in words and as JSON."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fullband.quickstart as fullband_quickstart
from cli.commands import Trained, checkpoint_of, contents, fullband, write_recipe
from fullband.presets import PAPER_RUNS, TRUNKS

RECIPES = Path(__file__).parents[2] / "recipes"

COMMANDS = ["quickstart", "train", "generate", "evaluate-loss", "diagnose", "info"]


def test_help_is_fast_because_it_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['fullband', '--help']\n"
        "from fullband.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, [m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip().endswith("0 []")
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    text = fullband(command, "--help").out
    examples = text[text.index("Examples:") :].splitlines()
    assert sum(line.strip().startswith(f"fullband {command}") for line in examples) >= 3


def test_version() -> None:
    assert fullband("--version").out.startswith("fullband 0.")
    module = subprocess.run([sys.executable, "-m", "fullband", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == fullband("--version").out


def test_train_reports_on_stderr_and_sums_up_on_stdout(task_run: Trained) -> None:
    done = task_run.done
    assert done.code == 0
    assert "stack matrices" in done.err and "step 1/20" in done.err and "step 20/20" in done.err
    assert "validation loss by feedback passes  0: " in done.err
    assert "feedback switched on: the second pass starts" in done.err
    assert "20 steps, 960 tokens" in done.out
    assert str(checkpoint_of(task_run.folder)) in done.out.replace("\n", "")


def test_train_as_json(text_run: Trained) -> None:
    result = text_run.done.json
    assert result["complete"] and result["steps"] == 10 and result["tokens"] == 10 * 4 * 24
    assert result["token_equivalent_compute"] > result["executed_positions"] > result["tokens"]
    assert set(result["validation"]) == {"0", "1", "exact"}
    assert result["switch_on_step"] == 5 and isinstance(result["switch_on_shock"], float)


def test_a_complete_run_resumes_to_itself(task_copy: Trained) -> None:
    before = contents(task_copy.folder / "checkpoints")
    done = fullband("train", task_copy.recipe, "--resume", "--json")
    assert done.code == 0 and "nothing left to do" in done.err
    assert done.json["complete"] and done.json["steps"] == 20
    assert contents(task_copy.folder / "checkpoints") == before


def test_a_dry_run_writes_nothing(recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = recipe()
    done = fullband("train", path, "--dry-run")
    assert done.code == 0
    assert all(
        words in done.out for words in ("Parameter groups", "0 to 9", "100% one-pass", "50% two-pass, 50% three-pass", "token-equivalent")
    )
    plan = fullband("train", path, "--dry-run", "--json").json
    assert plan["run"]["cost"]["token_equivalent"] == 960 * 1.75
    assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_dry_run_of_a_large_model_needs_no_memory(recipe: Callable[..., Path]) -> None:
    plan = fullband("train", recipe(model={"preset": "paper-1b"}), "--dry-run", "--json").json
    assert plan["model"]["parameters"]["glu"] == 736_100_352


def test_quickstart_hands_on_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fake(seed: int, output: Path, overrides: list[str], console: Any) -> dict[str, Any]:
        console.print("training")
        return {"seed": seed, "output": str(output), "overrides": overrides, "nothing": math.nan}

    monkeypatch.setattr(fullband_quickstart, "quickstart", fake)
    done = fullband("quickstart", "--seed", "2", "--output", tmp_path, "--set", "data.source.group=A5", "--json")
    assert done.json == {"seed": 2, "output": str(tmp_path), "overrides": ["data.source.group=A5"], "nothing": None}
    assert done.err == "training\n"
    assert fullband("quickstart").out == "training\n"


def test_generate_streams_the_continuation_alone(text_run: Trained) -> None:
    streamed = fullband("generate", text_run.folder, "the quick", "--max-new-tokens", "12")
    whole = fullband("generate", text_run.folder, "the quick", "--max-new-tokens", "12", "--no-stream")
    assert streamed.code == 0 and streamed.err == "" and streamed.out == whole.out
    assert not streamed.out.startswith("the quick")


@pytest.mark.parametrize(
    ("mode", "passes", "read"), [("standard", [], 0), ("soft", [], 0), ("fused", [], 1), ("fused", ["3"], 3), ("fused", ["exact"], "exact")]
)
def test_generate_as_json(text_run: Trained, mode: str, passes: list[str], read: int | str) -> None:
    options = [option for value in passes for option in ("--feedback-passes", value)]
    result = fullband("generate", text_run.folder, "the quick", "--mode", mode, *options, "--max-new-tokens", "5", "--json").json
    assert (result["mode"], result["feedback_passes"], result["prompt_tokens"]) == (mode, read, 9)
    (completion,) = result["completions"]
    assert len(completion["tokens"]) == 5 or completion["finish_reason"] == "stop"


def test_generate_samples_by_its_seed(text_run: Trained) -> None:
    texts = [fullband("generate", text_run.folder, "the", "--temperature", "1.5", "--seed", seed).out for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_generate_fills_the_context_by_default(task_run: Trained) -> None:
    result = fullband("generate", task_run.folder, "1 2 3", "--json").json
    assert len(result["completions"][0]["tokens"]) == 48 - 3


def test_evaluate_loss_of_a_runs_own_data(task_run: Trained) -> None:
    done = fullband("evaluate-loss", task_run.folder, "--feedback-passes", "0,1,exact", "--documents", "4", "--json")
    rows = done.json["rows"]
    assert [row["feedback_passes"] for row in rows] == [0, 1, "exact"]
    assert (done.json["documents"], done.json["tokens"]) == (4, 48)
    assert rows[0]["perplexity"] == pytest.approx(math.exp(rows[0]["loss"]))
    assert rows[1]["difference"] == pytest.approx(rows[1]["loss"] - rows[0]["loss"])
    assert rows[1]["loss_stderr"] > 0
    validation = task_run.done.out.splitlines()[1]  # the same 4 rows, after the last step
    assert validation == "validation loss by feedback passes: " + ", ".join(f"{row['feedback_passes']}: {row['loss']:.4f}" for row in rows)


def test_evaluate_loss_as_a_table(text_run: Trained) -> None:
    done = fullband("evaluate-loss", text_run.folder, "--documents", "3")
    assert done.code == 0 and "3 documents" in done.out and "difference to 0" in done.out


def test_evaluate_loss_of_files_and_of_a_recipe(text_run: Trained, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 20)
    (tmp_path / "b.txt").write_text("a lazy dog\n" * 20)
    files = fullband("evaluate-loss", text_run.folder, "--text", tmp_path / "a.txt", "--text", tmp_path / "b.txt", "--json").json
    assert (files["documents"], files["tokens"]) == (2, 20 * 20 + 11 * 20)
    by_recipe = fullband("evaluate-loss", text_run.folder, "--recipe", text_run.recipe, "--json").json
    own = fullband("evaluate-loss", text_run.folder, "--json").json
    assert by_recipe["rows"] == own["rows"]


def test_info_of_the_papers_model() -> None:
    done = fullband("info", "paper-1b")
    assert "1,065,573,888" in done.out and "0.37% of a decoded token" in done.out
    assert "30B" in done.out and "40B*" in done.out and "256B" in done.out and "512B" in done.out
    runs = fullband("info", "paper-1b", "--json").json["paper_runs"]
    assert [round(run["cost"]["token_equivalent"] / 1e9) for run in runs] == [30, 150, 256, 512]
    assert [run["paper_prints"] for run in runs] == [40e9, 150e9, 256e9, 512e9]


@pytest.mark.parametrize("name", sorted(PAPER_RUNS))
def test_info_says_the_same_of_a_paper_run_by_preset_and_by_recipe(name: str) -> None:
    by_preset = next(run for run in fullband("info", "paper-1b", "--json").json["paper_runs"] if run["run"] == name)["cost"]
    recipe = fullband("info", RECIPES / f"{name}.yaml", "--json").json["run"]
    assert recipe["cost"] == pytest.approx(by_preset, rel=1e-4)  # the recipe has whole steps
    assert by_preset["executed_positions"] / by_preset["tokens"] == pytest.approx(1 + 0.5625 * (by_preset["passes"] - 1), rel=1e-3)


@pytest.mark.parametrize("preset", sorted(TRUNKS))
def test_info_of_presets(preset: str) -> None:
    found = fullband("info", preset, "--json").json
    assert found["model"]["parameters"]["total"] > 0 and found["model"]["decoding"]["memory"]["float32"]["total"] > 0
    assert set(found["training_memory"]["passes"]) == {"1", "2", "3"}


def test_info_of_a_recipe_and_of_its_run(task_run: Trained) -> None:
    of_recipe = fullband("info", task_run.recipe, "--set", "train.steps=40", "--json").json
    assert of_recipe["run"]["steps"] == 40 and of_recipe["run"]["mixture"] == {"1": 0.5, "2": 0.25, "3": 0.25}
    of_run = fullband("info", task_run.folder, "--json").json
    assert of_run["model"]["parameters"] == of_recipe["model"]["parameters"]
    assert fullband("info", task_run.recipe).code == fullband("info", task_run.folder).code == 0


def test_a_cut_warmup_is_said_before_and_when_training_starts(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """A recipe's 200 steps in a trial run of 9."""
    cut = "the learning rates warm up over 3 steps, a third of the run, not optim.warmup_steps=200"
    path = recipe(train={"steps": 9}, optim={"warmup_steps": 200}, output=str(tmp_path / "run"))
    assert cut in fullband("info", path).out and cut in fullband("train", path, "--dry-run").out
    assert f"note: {cut}" in fullband("train", path).err
    found = fullband("info", path, "--json").json["run"]["warmup"]
    assert found == {"steps": 3, "in_recipe": 200}
    assert "warm up over 3 steps\n" in fullband("info", path, "--set", "optim.warmup_steps=3").out


def test_info_without_the_recipes_tokenizer(recipe: Callable[..., Path]) -> None:
    """A preset states its vocabulary, so what a run costs can be said where its tokenizer cannot be had."""
    path = recipe(model={"preset": "10m"}, data={"tokenizer": "nowhere/tokenizer.json", "length": 64})
    assert fullband("info", path, "--json").json["model"]["shape"]["vocab_size"] == 8192


def test_one_process_of_many_speaks_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fullband.training as training

    real, recipe = training.train, write_recipe(tmp_path, evaluation__rows=0)
    monkeypatch.setattr(training, "train", lambda *given: replace(real(*given), main=False))
    done = fullband("train", recipe, "--json")
    assert (done.code, done.out) == (0, "")
