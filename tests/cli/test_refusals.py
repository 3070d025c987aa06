"""What training would be refused for is refused before its first step, by a dry run in the same words; and nothing is written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.commands import TRUNK, Trained, fullband, refused
from fullband.cli.errors import LESS_ELSEWHERE, LESS_MEMORY, explain
from fullband.cli.prompt_files import open_output
from fullband.config import load_recipe
from fullband.training.stop import stop_signals

FEEDS_BACK = [{"fraction": 1.0, "passes": {2: 1.0}}]
NOTHING_HELD_OUT = {"length": 12, "source": {"kind": "python-stdlib", "validation_fraction": 0}}
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"feedback": {"schedule": FEEDS_BACK, "control": "shuffled"}, "evaluation": {"rows": 5, "batch_rows": 2}}, "leave one alone"),
    ({"feedback": {"schedule": FEEDS_BACK, "control": "shuffled"}, "train__microbatch_rows": 1}, "train.microbatch_rows is 1"),
    ({"feedback": {"schedule": FEEDS_BACK, "control": "shuffled"}, "train__batch_rows": 1}, "train.batch_rows is 1"),
    ({"feedback": {"schedule": FEEDS_BACK, "control": "shuffled", "adaptive": {"rows": 1}}}, "feedback.adaptive.rows is 1"),
    ({"feedback__prefix": "answer"}, "'answer' needs data that say where answers begin"),
    ({"data": NOTHING_HELD_OUT, "model__trunk": TRUNK | {"vocab_size": 257}}, "no documents are held out"),
    ({"train__device": "meta"}, "'meta' is not available here (it has shapes but no values)"),
    ({"optim__adam_betas": [2.0, 0.9]}, "optim.adam_betas.0: must be less than 1"),
    ({"optim__adam_lr": float("inf")}, "optim.adam_lr: must be a finite number"),
    ({"optim__matrix_lr": 1e308}, "optim.matrix_lr: must be at most 1"),
    ({"optim__adam_eps": 5e-324}, "optim.adam_eps: must be at least"),
    ({"train__steps": 0.5}, "train.steps: must be a whole number, got 0.5"),
    ({"feedback__jitter": float("nan")}, "feedback.jitter: must be"),
    ({"feedback": {"adaptive": {"floor": 0.6, "ceiling": 0.5}}}, "floor must be at most the ceiling (0.5), got 0.6"),
    ({"name": "n" * 300}, "name: string should have at most 200 characters"),
    ({"output": "x" * 300}, "a name of 300 bytes; file systems take 255"),
    ({"train__steps": 10**12}, "train.steps: must be at most 1000000000"),
    ({"train__steps": 10**400}, ", got a number of 400 digits"),
    ({"model__trunk": TRUNK | {"layers": 10**12}}, "layers: must be at most 4096"),
    ({"evaluation__feedback_passes": [10**12]}, "evaluation.feedback_passes.0: must be at most 100000"),
    ({"feedback__schedule": [{"fraction": 1.0, "passes": {10**12: 1.0}}]}, "numbers of passes must be at most 256, got 1000000000000"),
    ({"data__length": 10**12}, "data.length: must be at most"),
]


@pytest.mark.parametrize(("overrides", "words"), PARTS, ids=[words[:40] for _, words in PARTS])
def test_a_dry_run_refuses_what_training_refuses(recipe: Callable[..., Path], tmp_path: Path, overrides: Any, words: str) -> None:
    path = recipe(**overrides)
    dry, wet = refused("train", path, "--dry-run"), refused("train", path)
    assert words in dry and dry == wet and len(dry) < 400
    assert not (tmp_path / "run").exists()


def test_converged_validation_of_chat_data(recipe: Callable[..., Path], tmp_path: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"it is {i}"}]} for i in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"kind": "chat", "paths": str(tmp_path / "chat.jsonl"), "validation_fraction": 0.2}
    path = recipe(
        data={"source": source, "length": 96},
        model={"trunk": TRUNK | {"vocab_size": 300, "context": 96}},
        feedback={"schedule": FEEDS_BACK, "prefix": "answer"},
        evaluation={"rows": 2, "feedback_passes": [0, "converged"]},
    )
    for more in (["--dry-run"], []):
        assert "must be 0, 1, 2, … or 'exact' for chat data, got 'converged'" in refused("train", path, *more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "train: must be given once in a section, is given again in line 2"),
        ("optim:\n  adam_lr: 1\n  adam_lr: 2\n", "adam_lr: must be given once in a section, is given again in line 3"),
        ("seed: 2001-99-99\n", "month must be in 1..12"),
        ("seed: " + "9" * 5000, "Exceeds the limit (4300 digits)"),
        ("seed: " + "[" * 5000, "nested too deep"),
        ("seed: " + "{a: " * 5000, "nested too deep"),
    ],
)
def test_yaml_that_says_two_things_or_none(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert str(caught.value).startswith(f"{tmp_path / 'r.yaml'}: ") and len(str(caught.value)) < 300


def test_an_override_that_is_no_value_is_named_shortly() -> None:
    for value in ("2001-99-99", "9" * 5000, "[" * 5000):
        line = refused("train", "tiny-text", "--set", f"train.steps={value}", "--dry-run")
        assert "--set" in line and len(line) < 300


def test_another_optimizer_is_named(task_copy: Trained) -> None:
    line = refused("train", task_copy.recipe, "--set", "optim.kind=adam", "--set", "train.steps=30", "--resume")
    assert "was it trained with another optim.kind?" in line


def test_an_empty_mode_is_no_mode(text_run: Trained) -> None:
    assert "unknown mode ''" in refused("generate", text_run.folder, "x", "--mode", "")


@pytest.mark.parametrize("words", [["--n", "1000000000000"], ["--max-new-tokens", "1000000000000", "--overflow", "slide"]])
def test_absurd_numbers_of_samples_and_tokens(text_run: Trained, words: list[str]) -> None:
    assert "got 1000000000000" in refused("generate", text_run.folder, "x", *words)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is full, as Linux has one")
def test_a_full_disk_names_the_file() -> None:
    with pytest.raises(OSError) as caught, open_output(Path("/dev/full")) as file:
        file.write("a line\n")
        file.flush()
    assert explain(caught.value) == "/dev/full: No space left on device"


@pytest.mark.parametrize("text", ["can't allocate memory: you tried to allocate 4 bytes", "not enough memory: you tried to allocate 4"])
def test_memory_that_is_not_there(text: str, recipe: Callable[..., Path], text_run: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: {text}")

    assert explain(RuntimeError(f"DefaultCPUAllocator: {text}")) == "out of memory"
    monkeypatch.setattr("fullband.training.loop.prepare", fails)
    assert LESS_MEMORY["train"] in refused("train", recipe())
    monkeypatch.setattr("fullband.cli.generate.open_model", fails)
    assert LESS_ELSEWHERE in refused("generate", text_run.folder, "x")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_a_terminal_that_is_closed_saves_the_run(recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And its progress, which can be written nowhere, stops nothing."""
    from fullband.training.progress import TrainingProgress

    def hang_up(self: Any, run: Any, values: Any) -> None:
        if run.step == 3:
            signal.raise_signal(signal.SIGHUP)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(TrainingProgress, "stepped", hang_up)
    done = fullband("train", recipe(evaluation={"rows": 0}), "--json")
    assert done.code == 129 and done.json["steps"] == 3 and Path(done.json["checkpoint"]).is_dir()
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals():  # under nohup
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, ignored)


@pytest.mark.slow
def test_ctrl_c_while_the_command_is_being_imported() -> None:
    code = "import sys, signal, builtins\nreal = builtins.__import__\n" + (
        "def slow(name, *a, **k):\n    if name == 'typer': signal.raise_signal(signal.SIGINT)\n    return real(name, *a, **k)\n"
        "builtins.__import__ = slow\nfrom fullband.__main__ import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == ""
