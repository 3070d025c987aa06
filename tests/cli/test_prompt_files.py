"""A file of prompts in, jsonl out: order, resuming, and what is said of files that are none."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.commands import Done, Trained, fullband, refused
from fullband.cli import progress as progress_module
from fullband.cli.progress import BatchProgress
from fullband.cli.prompt_files import FileJob, read_prompts
from fullband.decode import NewText

LINES = ["the quick", "brown", "fox the quick brown", "über"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


def answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def generate(run: Trained, *arguments: str | Path) -> Done:
    return fullband("generate", run.folder, "--max-new-tokens", "8", *arguments)


def test_lines_are_those_of_the_prompts_alone(text_run: Trained, prompts: Path) -> None:
    done = generate(text_run, "--prompts", prompts, "--batch-size", "3")
    found = answers(done.out)
    assert [(line["id"], line["prompt"], line["sample"]) for line in found] == [(i, text, 0) for i, text in enumerate(LINES, start=1)]
    assert done.err.startswith("stdout: 4 completions")
    for line in found:
        (alone,) = generate(text_run, line["prompt"], "--json").json["completions"]
        assert (line["text"], line["tokens"], line["finish_reason"]) == (alone["text"], len(alone["tokens"]), alone["finish_reason"])


def test_samples_do_not_depend_on_the_batch(text_run: Trained, prompts: Path) -> None:
    options = ["--prompts", prompts, "--temperature", "1", "--n", "2"]
    one, all_at_once = (generate(text_run, *options, "--batch-size", size).out for size in ("1", "16"))
    assert one == all_at_once
    assert [(line["id"], line["sample"]) for line in answers(one)] == [(i, s) for i in range(1, 5) for s in range(2)]
    assert len({line["text"] for line in answers(one)}) == 8


def test_an_output_file_and_its_summary(text_run: Trained, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    done = generate(text_run, "--prompts", prompts, "--output", out, "--json", "--speculate")
    lines = answers(out.read_text(encoding="utf-8"))
    assert (done.json["prompts"], done.json["completions"], done.json["made_now"]) == (4, 4, 4)
    assert done.json["tokens"] == sum(line["tokens"] for line in lines) and done.json["speculation"]["passes"] > 0
    before = out.read_bytes()
    assert f"{out}: already exists; continue it with --resume" in refused(
        "generate", text_run.folder, "--prompts", prompts, "--output", out
    )
    again = generate(text_run, "--prompts", prompts, "--output", out, "--resume", "--speculate")
    assert again.code == 0 and "nothing left to do" in again.err and out.read_bytes() == before


@pytest.mark.parametrize("torn", [0, 20])
def test_an_interrupted_run_goes_on(text_run: Trained, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: int) -> None:
    options = ["--prompts", prompts, "--temperature", "1", "--n", "2", "--batch-size", "1"]
    whole, out = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    generate(text_run, *options, "--output", whole)
    identity = FileJob.identity

    def stops(job: FileJob, row: int) -> dict[str, Any]:
        if row == 5:
            raise KeyboardInterrupt
        return identity(job, row)

    monkeypatch.setattr(FileJob, "identity", stops)
    done = generate(text_run, *options, "--output", out)
    assert done.code == 130 and "continue with the same command and --resume" in done.err
    monkeypatch.undo()
    complete = whole.read_bytes()
    assert out.read_bytes() == b"".join(complete.splitlines(keepends=True)[:5])
    with open(out, "ab") as file:
        file.write(complete.splitlines()[5][:torn])
    done = generate(text_run, *options, "--output", out, "--resume")
    assert done.code == 0 and f"{out}: has 5 of 8 completions" in done.err.replace("\n", "")
    assert out.read_bytes() == complete


def test_another_runs_lines_are_not_continued(text_run: Trained, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    generate(text_run, "--prompts", prompts, "--output", out)
    before = out.read_bytes()
    command = ["generate", text_run.folder, "--max-new-tokens", "8", "--prompts", prompts, "--output", out, "--resume"]
    assert f"{out}:1: from another run (settings" in refused(*command, "--seed", "1")
    assert f'{out}:1: from another run (mode is "soft" there, "standard" here)' in refused(*command, "--mode", "standard")
    (tmp_path / "fewer.txt").write_text("the quick\n")
    assert f"{out}:2: the file has more completions than the 1 of this request" in refused(
        *command[:5], tmp_path / "fewer.txt", *command[6:]
    )
    assert out.read_bytes() == before
    for line in ("text", "[" * 5000):
        out.write_text(f"{line}\n")
        assert f"{out}:1: not a completion" in refused(*command)


def test_jsonl_and_standard_input(text_run: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = '{"prompt": "the quick", "id": "a"}\n\n{"prompt": "brown\\nfox", "other": 1}\n'
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    done = generate(text_run, "--prompts", path)
    assert [(line["id"], line["prompt"]) for line in answers(done.out)] == [("a", "the quick"), (3, "brown\nfox")]
    assert f"{path}: skipped 1 empty line (2)" in done.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert [prompt.id for prompt in read_prompts("-", print)] == ["a", 3]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\r\n two \n")))
    assert [(prompt.text, prompt.where) for prompt in read_prompts("-", print)] == [
        ("one", "standard input:1"),
        (" two ", "standard input:2"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p.txt", b"", "p.txt: has no prompts"),
        ("p.txt", b"\n \n", "p.txt: has no prompts"),
        ("p.txt", b"a\n\xff\n", "p.txt:2: not UTF-8"),
        ("p.txt", b"the\n" + b"the " * 20, "p.txt:2: the prompt has 80 tokens and does not fit the model's context of 48"),
        ("p.txt", b"the\n\n" + b"a" * 45, "p.txt:3: the prompt has 45 tokens; with max_new_tokens=8 it exceeds the model's context of 48"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2: not valid JSON"),
        ("p.jsonl", b"[" * 5000 + b"\n", "p.jsonl:1: not valid JSON"),
        ("p.jsonl", b'{"prompt": ' + b"1" * 5000 + b"}\n", "p.jsonl:1: not valid JSON"),
        ("p.jsonl", b'"a"\n', "p.jsonl:1: must be a JSON object with a field 'prompt', got a str"),
        ("p.jsonl", b'{"text": "a"}\n', "p.jsonl:1: no field 'prompt'; the fields there are text"),
        ("p.jsonl", b'{"prompt": 3}\n', "p.jsonl:1: the field 'prompt' must be text, got int"),
        ("p.jsonl", b'{"prompt": ""}\n', "p.jsonl:1: the prompt is empty"),
        ("p.jsonl", b'{"prompt": "a", "id": [1]}\n', "p.jsonl:1: the field 'id' must be a number or text, got list"),
        ("p.jsonl", b'{"prompt": "a", "id": 2}\n{"prompt": "b"}\n', "p.jsonl:2: the id 2 is already used in"),
    ],
)
def test_files_that_are_refused(text_run: Trained, tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "answers.jsonl"
    command = ["generate", text_run.folder, "--prompts", tmp_path / name, "--max-new-tokens", "8", "--output", out]
    assert expected in refused(*command).replace(f"{tmp_path}/", "")
    assert not out.exists()


def test_places_that_cannot_be_written(text_run: Trained, prompts: Path, tmp_path: Path) -> None:
    command = ["generate", text_run.folder, "--prompts", prompts, "--output"]
    assert f"{tmp_path}: is a folder" in refused(*command, tmp_path)
    assert "does not exist" in refused(*command, tmp_path / "nowhere" / "a.jsonl")


def test_progress_in_a_terminal_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LINES_EVERY", 0.0)
    steps = [NewText({}, {0: 1, 1: 2}, {}), NewText({}, {0: 1, 1: 2}, {0: "stop", 1: "length"})]
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, force_interactive=terminal, color_system=None, width=120)
        with BatchProgress(console, total=4, limit=2) as progress:
            watch = progress.of_batch(0, rows=2)
            for step in steps:
                watch(step)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert "completions" in text and "2/4" in text and "tokens/s" in text and "left" in text
