"""Bad input: one line that names the mistake, exit code 2, nothing written, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.commands import RECIPE, TRUNK, Trained, checkpoint_of, contents, fullband, refused, write_recipe
from fullband import config
from fullband.data.tokenizers import ByteTokenizer
from fullband.model import FullBandModel
from fullband.presets import TRUNKS

TWO_PASS = [{"fraction": 1.0, "passes": {2: 1.0}}]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"train__stepz": 5}, "train.stepz: unknown key; did you mean 'steps'?"),
        ({"feedback__jiter": 0.1}, "feedback.jiter: unknown key; did you mean 'jitter'?"),
        ({"train__steps": "many"}, "train.steps"),
        ({"train__steps": 0}, "train.steps"),
        (
            {"feedback__schedule": [{"fraction": 1.0, "passes": {0: 1.0}}]},
            "numbers of passes must be at least 1 (1 = without feedback), got 0",
        ),
        ({"feedback__schedule": "paper-300b"}, "did you mean 'paper-"),
        ({"model": {"preset": "paper-2b"}}, "unknown model preset 'paper-2b'; did you mean 'paper-1b'?"),
        ({"model__fusion": "sum"}, "feedback.connection.fusion"),
        ({"train__device": "abacus"}, "train.device: 'abacus' is not available"),
        ({"train__initial_checkpoint": "nowhere"}, "nowhere: no such model folder"),
        ({"data": {"source": {"kind": "files", "paths": ["nowhere.txt"]}, "length": 12}}, "nowhere.txt: no such file"),
        ({"data": {"tokenizer": "nowhere", "length": 12}}, "nowhere: no such tokenizer"),
        ({"model__trunk": TRUNK | {"vocab_size": 4}}, "4 is smaller than the tokenizer's 6"),
        ({"data": {"source": {"kind": "task"}, "length": 49}}, "must be at most the model's context of 48, got 49"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_recipe_that_does_not_fit(
    recipe: Callable[..., Path], tmp_path: Path, overrides: dict[str, Any], expected: str, options: list[str]
) -> None:
    assert expected in refused("train", recipe(**overrides), *options)
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_is_none(tmp_path: Path) -> None:
    assert "nowhere.yaml: no such recipe file" in refused("train", tmp_path / "nowhere.yaml")
    for content, expected in (("", "this file holds nothing"), ("- 1", "this file holds list"), ("a: [", "not readable as yaml")):
        (tmp_path / "recipe.yaml").write_text(content)
        assert expected in refused("train", tmp_path / "recipe.yaml")
    assert "--set train.steps: expected key.path=value" in refused("train", write_recipe(tmp_path), "--set", "train.steps")


def test_text_that_cannot_be_read(recipe: Callable[..., Path], tmp_path: Path) -> None:
    data = tmp_path / "text.jsonl"
    path = recipe(data={"source": {"kind": "files", "paths": [str(data)]}, "length": 12}, evaluation={"rows": 0})
    data.write_text("")
    assert f"{data}: the file is empty" in refused("train", path)
    data.write_text('{"text": "one"}\n{"text": "two"\n')
    assert f"{data}:2: not valid JSON" in refused("train", path)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_conversations_without_an_answer_to_train_on(recipe: Callable[..., Path], tmp_path: Path, options: list[str]) -> None:
    question, answer = ({"role": role, "content": role} for role in ("user", "assistant"))
    names = {"good": [question, answer], "long": [question, answer | {"content": "a" * 99}], "unanswered": [question]}
    files = {name: str(tmp_path / f"{name}.jsonl") for name in names}
    for name, messages in names.items():
        Path(files[name]).write_text(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m['content'] }};{% endfor %}")

    def line(training: str, held_out: str) -> str:
        source = {
            "kind": "chat",
            "paths": [files[training]],
            "validation_paths": [files[held_out]],
            "template": str(tmp_path / "plain.jinja"),
        }
        return refused("train", recipe(data={"source": source, "length": 24}), *options)

    assert f"{files['long']}: no training answer with its prompt fits sequences of 24 tokens" in line("long", "good")
    assert f"{files['unanswered']}: no training conversation has an answer" in line("unanswered", "good")
    assert f"{files['long']}: no held-out answer with its prompt fits sequences of 24 tokens" in line("good", "long")
    assert f"{files['unanswered']}: no held-out conversation has an answer" in line("good", "unanswered")


def test_a_run_folder_that_cannot_be_written(recipe: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file" / "run", tmp_path / "file"):
        assert f"{folder}: cannot write the run folder" in refused("train", recipe(output=str(folder)))
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_run_that_exists_is_not_overwritten(task_copy: Trained) -> None:
    before = contents(task_copy.folder)
    assert "already holds a run; continue it with --resume" in refused("train", task_copy.recipe)
    assert contents(task_copy.folder) == before


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"seed": 4}, "cannot resume with another seed"),
        ({"data": {"source": {"kind": "task", "group": "Z6"}, "length": 12}}, "cannot resume with another data"),
        ({"data": {"source": {"kind": "task"}, "length": 10}}, "cannot resume with another data"),
        ({"model__trunk": TRUNK | {"window": 7}}, "cannot resume with another model"),
    ],
)
def test_a_run_is_not_resumed_as_another(task_copy: Trained, overrides: dict[str, Any], expected: str) -> None:
    path = write_recipe(task_copy.recipe.parent, **overrides)
    before = contents(task_copy.folder)
    assert expected in refused("train", path, "--resume")
    assert contents(task_copy.folder) == before


def test_there_must_be_something_to_resume(recipe: Callable[..., Path], tmp_path: Path) -> None:
    assert "no checkpoint to resume from" in refused("train", recipe(), "--resume")
    assert not (tmp_path / "run").exists()


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        content = content[: len(content) // 2]
    else:
        content[-5] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "bit-flipped"])
@pytest.mark.parametrize("manifest", [True, False])
def test_damaged_weights_are_named(task_copy: Trained, how: str, manifest: bool) -> None:
    checkpoint = checkpoint_of(task_copy.folder)
    damage(checkpoint / "model.safetensors", how)
    if not manifest:  # which flipped bit would be seen?
        (checkpoint / "manifest.json").unlink()
    named = f"{checkpoint / 'model.safetensors'}: damaged" if manifest else f"{checkpoint / 'manifest.json'}: missing"
    for command in (["generate", task_copy.folder, "1 2"], ["evaluate-loss", task_copy.folder]):
        assert named in refused(*command)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "training.json", "config.json"])
def test_a_damaged_checkpoint_is_not_resumed(task_copy: Trained, name: str) -> None:
    checkpoint = checkpoint_of(task_copy.folder)
    damage(checkpoint / name, "bit-flipped")
    assert str(checkpoint / name) in refused("train", task_copy.recipe, "--resume")


def test_a_damaged_line_of_the_metrics_is_named(task_copy: Trained) -> None:
    path = task_copy.folder / "metrics.jsonl"
    before = path.read_text().replace('"step":', '"step"', 1)
    path.write_text(before)
    for command in (["train", task_copy.recipe, "--resume"], ["compare-runs", task_copy.folder]):
        assert f"{path}:1: damaged; remove the line" in refused(*command)
    assert path.read_text() == before


def test_a_checkpoint_of_another_shape(task_run: Trained, recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = recipe(train__initial_checkpoint=str(task_run.folder), model__trunk=TRUNK | {"width": 32})
    line = refused("train", path)
    assert "width: 16 there, 32 in the recipe" in line
    assert not (tmp_path / "run").exists()
    assert fullband("train", recipe(train__initial_checkpoint=str(task_run.folder), train__steps=1)).code == 0


@pytest.mark.parametrize("command", [["generate", "MODEL", "1 2"], ["evaluate-loss", "MODEL"], ["info", "MODEL"]])
def test_a_model_folder_that_is_none(command: list[str], tmp_path: Path) -> None:
    def of(folder: Path) -> str:
        return refused(*[str(folder) if word == "MODEL" else word for word in command])

    assert "not a model folder" in of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "a plain 'llama' checkpoint, without a fusion; convert it first: fullband convert" in of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert f"{tmp_path / 'config.json'}: not readable as JSON" in of(tmp_path)
    if command[0] != "info":
        assert "no such model folder" in of(tmp_path / "nowhere")


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    FullBandModel(TRUNKS["tiny"]).save(tmp_path / "model")
    assert "no tokenizer in this folder" in refused("generate", tmp_path / "model", "abc")


def test_token_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    model = tmp_path / "model"
    FullBandModel(TRUNKS["tiny"].model_copy(update={"vocab_size": 100})).save(model)
    ByteTokenizer().save(model)
    (tmp_path / "text.txt").write_text("xyz")
    assert "token id 122 at position 2 is outside 0..99" in refused("generate", model, "aaz")
    assert "token id 120 is outside the vocabulary (0..99)" in refused("evaluate-loss", model, "--text", tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["the " * 20], "does not fit the model's context of 48"),
        (["the", "--max-new-tokens", "46"], "exceeds the model's context of 48 (room for 45)"),
        (["the", "--max-new-tokens", "0"], "max_new_tokens must be 1 to"),
        ([""], "the prompt is empty"),
        (["the", "--mode", "hard"], "unknown mode 'hard' (known: standard, soft, fused)"),
        (["the", "--mode", "fused", "--feedback-passes", "0"], "at least 1 feedback pass"),
        (["the", "--mode", "fused", "--feedback-passes", "-1"], "must be 0, 1, 2, …, exact or converged, got '-1'"),
        (["the", "--mode", "soft", "--feedback-passes", "2"], "needs the mode fused"),
        (["the", "--temperature", "-1"], "temperature is a number ≥ 0"),
        (["the", "--top-p", "0"], "top_p is a probability above 0"),
        (["the", "--top-k", "0"], "top_k keeps at least 1 token"),
        (["the", "--min-p", "1"], "min_p is at least 0 and below 1"),
        (["the", "--repetition-penalty", "0"], "repetition_penalty is a number above 0"),
        (["the", "--n", "0"], "n, the samples of each prompt, must be 1 to"),
        (["the", "--stop", ""], "a stop string must have at least one character"),
        (["the", "--overflow", "spill"], "unknown overflow 'spill' (known: refuse, slide)"),
        ([], "give a PROMPT or --prompts FILE"),
        (["the", "--prompts", "p.txt"], "give a PROMPT or --prompts FILE, not both"),
        (["the", "--output", "a.jsonl"], "--output needs --prompts FILE"),
        (["--prompts", "p.txt", "--resume"], "--resume needs --output"),
        (["--prompts", "p.txt", "--json"], "--json, a summary, needs --output"),
        (["--prompts", "nowhere.txt"], "nowhere.txt: no such file of prompts"),
        (["the", "--html", "a.html"], "--html needs --compare"),
        (["the", "--compare", "--mode", "soft"], "leave out --mode"),
        (["the", "--compare", "--n", "2"], "leave out --n"),
        (["the", "--compare", "--speculate"], "leave out --speculate"),
        (["the", "--compare", "--html", "nowhere/a.html"], "the folder nowhere does not exist"),
        (["the", "--device", "abacus"], "--device: 'abacus' is not available"),
        (["the", "--dtype", "int8"], "--dtype: must be one of"),
    ],
)
def test_generate_refuses(text_run: Trained, arguments: list[str], expected: str) -> None:
    assert expected in refused("generate", text_run.folder, *arguments)


def test_generate_refuses_words_that_are_no_tokens(task_run: Trained) -> None:
    assert "'nine' is not a token of task:group-word S3" in refused("generate", task_run.folder, "1 nine")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--feedback-passes", "0,half"], "must be 0, 1, 2, …, exact or converged, got 'half'"),
        (["--feedback-passes", ""], "must be 0, 1, 2, …, exact or converged, got ''"),
        (["--text", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml: no such recipe file"),
        (["--text", "a.txt", "--recipe", "b.yaml"], "give only one of them"),
    ],
)
def test_evaluate_loss_refuses(text_run: Trained, arguments: list[str], expected: str) -> None:
    assert expected in refused("evaluate-loss", text_run.folder, *arguments)


def test_evaluate_loss_refuses_another_tokenizer(text_run: Trained, task_run: Trained) -> None:
    assert "its tokenizer is task:group-word S3, the model's is bytes" in refused(
        "evaluate-loss", text_run.folder, "--recipe", task_run.recipe
    )


def test_evaluate_loss_of_a_model_that_has_left_its_run(task_run: Trained, tmp_path: Path) -> None:
    shutil.copytree(checkpoint_of(task_run.folder), tmp_path / "a" / "b" / "model")
    assert "no recipe of a run was found beside it" in refused("evaluate-loss", tmp_path / "a" / "b" / "model")


def test_info_of_nothing() -> None:
    assert "did you mean 'paper-1b'? (presets: paper-1b, 100m, 10m, tiny)" in refused("info", "paper1b")
    assert "nowhere.yaml: no such recipe file" in refused("info", "nowhere.yaml")
    assert "--set needs a recipe, got tiny" in refused("info", "tiny", "--set", "train.steps=2")


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "x.yaml", "--stepz", "3"], ["info", "tiny", "--set"]])
def test_unknown_commands_and_options(arguments: list[str]) -> None:
    done = fullband(*arguments)
    assert done.code == 2 and done.out == "" and "Error: " in done.err


def test_divergence_is_one_line_and_keeps_the_last_good_state(recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = recipe(optim={"matrix_lr": 1e30, "adam_lr": 1e30, "warmup_steps": 0}, feedback={"schedule": TWO_PASS})
    line = refused("train", path)
    assert "step 1: the " in line and " is nan; " in line and str(tmp_path / "run" / "checkpoints") in line
    FullBandModel.load(tmp_path / "run")


def test_a_full_disk_keeps_the_checkpoint_before(recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if "step-00000010" in str(target):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    line = refused("train", recipe(evaluation={"rows": 0}))
    assert "No space left on device" in line and str(tmp_path / "run") in line
    monkeypatch.undo()
    assert checkpoint_of(tmp_path / "run").name == "step-00000005"
    assert fullband("train", tmp_path / "recipe.yaml", "--resume", "--json").json["complete"]


def test_the_traceback_on_request(recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLBAND_TRACEBACK", "1")
    done = fullband("train", recipe(train__stepz=1))
    assert done.code == 2 and "Traceback" in done.err and done.err.rstrip().splitlines()[-1].startswith("error: ")


def test_a_bug_keeps_its_traceback(recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "load_recipe", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fullband("train", recipe())


def test_the_shared_recipe_is_whole() -> None:
    assert yaml.safe_load(yaml.safe_dump(RECIPE)) == RECIPE
