"""`fullband chat`: piped, and in a terminal."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cli.commands import Done, refused
from fullband.config import TrunkConfig
from fullband.data.tokenizers import ByteTokenizer, load_tokenizer
from fullband.decode import generate
from fullband.hf.convert import convert
from fullband.loading import load_model
from fullband.model import FullBandModel
from hf.sources import write_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chat")
    convert(write_source(root / "source"), root / "model", "gated")
    return root / "model"


def chat(folder: Path, said: str, *options: str) -> Done:
    from fullband.cli.main import app

    result = CliRunner().invoke(app, ["chat", str(folder), "--max-new-tokens", "12", *options], input=said)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def answers(done: Done) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def test_a_turn_is_the_whole_conversation_read_again(folder: Path) -> None:
    """Law 6: the second prompt holds the first answer, and is a prompt like any other."""
    for mode, passes in (("standard", None), ("soft", None), ("fused", 2)):
        options = ["--mode", mode, "--temperature", "0", "--json", "--system", "Be brief."]
        first, second = answers(chat(folder, "hello\nand now?\n", *options, *(["--feedback-passes", str(passes)] if passes else [])))
        text = (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
            f"{first['text']}<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
        )
        tokenizer, model = load_tokenizer(folder), load_model(folder)
        prompt = tokenizer.encode(text)
        assert second["prompt_tokens"] == len(prompt)
        (expected,) = generate(model, [prompt], mode, passes, max_new_tokens=12, stop_ids=tokenizer.stops)
        assert second["text"] == tokenizer.decode(expected.tokens)
        assert (second["turn"], second["mode"], second["finish_reason"]) == (2, mode, expected.finish_reason)


def test_replay_answers_the_turn_in_another_mode_with_the_same_draws(folder: Path) -> None:
    said = "hello\n/replay standard\n/replay soft\n/replay fused\n/mode standard\nmore\n/replay\n"
    soft, standard, again, fused, more, replayed = answers(chat(folder, said, "--json", "--temperature", "1.5", "--seed", "7"))
    assert [a["mode"] for a in (soft, standard, again, fused)] == ["soft", "standard", "soft", "fused"]
    assert soft["text"] == again["text"] and len({a["text"] for a in (soft, standard, fused)}) == 3
    assert more["prompt_tokens"] > fused["prompt_tokens"] and more["mode"] == "standard"  # goes on from the last answer
    timeless = [{key: value for key, value in answer.items() if key != "seconds"} for answer in (more, replayed)]
    assert timeless[0] == timeless[1]
    other = answers(chat(folder, "hello\n", "--json", "--temperature", "1.5", "--seed", "8"))
    assert other[0]["text"] != soft["text"]


def test_commands(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    said = f"/system Be kind.\nhello\n/passes 3\nagain\n/save {saved}\n/reset\n//slash\n/system\n/help\n/exit\nnot read\n"
    first, second, third = answers(chat(folder, said, "--json", "--temperature", "0"))
    assert (first["mode"], second["mode"], second["feedback_passes"]) == ("soft", "fused", 3)
    assert (third["turn"], third["user"]) == (1, "/slash") and third["prompt_tokens"] < second["prompt_tokens"]
    talk = json.loads(saved.read_text())
    assert talk["system"] == "Be kind." and talk["turns"] == [first, second] and talk["model"] == str(folder)


def test_plain_output_is_the_answers_alone(folder: Path) -> None:
    done = chat(folder, "hello\n/mode standard\n/help\nhello\n", "--temperature", "0")
    (first, second) = answers(chat(folder, "hello\n/mode standard\nhello\n", "--temperature", "0", "--json"))
    assert done.out == f"{first['text']}\n{second['text']}\n"
    assert "mode standard" in done.err and "/replay" in done.err


def test_a_model_without_a_template_says_so(trunk_config: Callable[..., TrunkConfig], tmp_path: Path) -> None:
    FullBandModel(trunk_config(vocab_size=257, context=128), "residual").save(tmp_path)
    ByteTokenizer().save(tmp_path)
    done = chat(tmp_path, "hi\n", "--json", "--temperature", "0")
    assert "its fusion is not trained yet: soft and fused give the same text as standard" in done.err
    assert "this model has no chat template; using ChatML" in done.err
    assert answers(done)[0]["prompt_tokens"] == len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_bad_input_is_one_line(folder: Path, tmp_path: Path) -> None:
    assert "unknown mode 'loud'" in refused("chat", folder, "--mode", "loud")
    assert "needs the mode fused" in refused("chat", folder, "--feedback-passes", "2")
    assert "no such model folder" in refused("chat", tmp_path / "nowhere")
    for said, expected in (
        ("/mod soft\n", "/mod: no such command; did you mean /mode?"),
        ("/replay soft\n", "there is no turn to replay yet"),
        ("/passes many\n", "must be 0, 1, 2, …, exact or converged, got 'many'"),
        ("/save\n", "/save needs the name of a file"),
        (f"/save {tmp_path}/no/such/talk.json\n", "No such file or directory"),
        ("x" * 600 + "\n", "does not fit the model's context of 512"),
    ):
        done = chat(folder, said)
        assert done.code == 2 and expected in done.err.splitlines()[-1] and "Traceback" not in done.err, done.err


@pytest.fixture
def talkative(folder: Path, tmp_path: Path) -> Path:
    """A model whose greedy answers do not end: its stop ids' logits are 0, never the largest, and its context is long."""
    shutil.copytree(folder, tmp_path / "talkative")
    model = load_model(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[sorted(load_tokenizer(folder).stops)] = 0
    model.config.trunk_config.max_position_embeddings = 10**6
    model.save_pretrained(tmp_path / "talkative")
    return tmp_path / "talkative"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a Unix thing")
def test_in_a_terminal_ctrl_c_cancels_the_answer_and_mistakes_are_told(talkative: Path) -> None:
    import pty

    leader, follower = pty.openpty()
    code = "from fullband.cli.main import main; main()"
    command = [sys.executable, "-c", code, "chat", str(talkative), "--max-new-tokens", "100000", "--temperature", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}

    def heed_ctrl_c() -> None:  # what runs in the background of a shell without job control is started deaf to it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    streams: Any = dict(stdin=follower, stdout=follower, stderr=follower)
    child = subprocess.Popen(command, **streams, start_new_session=True, env=environment, preexec_fn=heed_ctrl_c)
    os.close(follower)
    seen = ""

    def wait_for(text: str, after: int = 0) -> None:
        nonlocal seen
        deadline = time.monotonic() + 120
        while text not in seen[after:]:
            assert select.select([leader], [], [], max(0, deadline - time.monotonic()))[0], seen
            seen += os.read(leader, 4096).decode(errors="replace")

    def say(line: str) -> int:
        os.write(leader, f"{line}\n".encode())
        return len(seen)

    try:
        wait_for("soft> ")
        here = say("/mod soft")
        wait_for("did you mean /mode?", here)
        wait_for("soft> ", here)
        here = say("hello")
        wait_for("hello\r\n", here)
        while seen.endswith("hello\r\n"):  # until the answer streams: a Ctrl-C before it would be the prompt's
            assert select.select([leader], [], [], 120)[0], seen
            seen += os.read(leader, 4096).decode(errors="replace")
        os.killpg(child.pid, signal.SIGINT)
        wait_for("(cancelled)", here)
        wait_for("soft> ", here)
        here = say("/mode standard")
        wait_for("standard> ", here)
        os.write(leader, b"\x04")  # Ctrl-D
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        os.close(leader)
    assert "Traceback" not in seen
