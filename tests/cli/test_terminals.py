"""Terminals that have not every character: what was found is written, in other words."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.commands import Trained
from fullband.cli.console import output, print_json, spell_what_cannot_be_written
from fullband.cli.main import app

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="closes what a child of os.fork writes to")
ENCODINGS = ["ascii", "latin-1", "cp1252"]


class Terminal:
    """stdout and stderr in an encoding."""

    def __init__(self, encoding: str, monkeypatch: pytest.MonkeyPatch):
        self.streams = {name: io.BytesIO() for name in ("stdout", "stderr")}
        for name, content in self.streams.items():
            monkeypatch.setattr(sys, name, io.TextIOWrapper(content, encoding=encoding, errors="strict", write_through=True))
        self.encoding = encoding

    def run(self, *words: str | Path) -> tuple[int, str]:
        """(exit code, stdout)."""
        with pytest.raises(SystemExit) as left:
            app([str(word) for word in words])
        return int(left.value.code or 0), self.out

    @property
    def out(self) -> str:
        sys.stdout.flush()
        return (
            self.streams["stdout"].getvalue().decode(self.encoding, errors="replace")
        )  # click takes ASCII for a mistake, and writes UTF-8


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_whatever_is_printed_arrives(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(encoding, monkeypatch)
    spell_what_cannot_be_written()
    print("0.67 ± 0.01 × … → ≥ 🙂 λ")
    output().print("mean ± error: 🙂")
    assert "0.67 " in terminal.out and "\\U0001f642" in terminal.out and "\\u03bb" in terminal.out and "-> >=" in terminal.out
    if terminal.encoding == "ascii":
        assert "0.67 +- 0.01 x ... ->" in terminal.out
    else:
        assert "0.67 ± 0.01 × " in terminal.out


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_loses_nothing(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(encoding, monkeypatch)
    spell_what_cannot_be_written()
    value = {"text": "é ± 🙂 \ufffd", "λ": 1.5}
    print_json(value)
    assert json.loads(terminal.out) == value


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_commands(encoding: str, monkeypatch: pytest.MonkeyPatch, text_run: Trained, tmp_path: Path) -> None:
    terminal = Terminal(encoding, monkeypatch)
    assert terminal.run("info", text_run.folder)[0] == 0
    assert terminal.run("evaluate-loss", text_run.folder, "--feedback-passes", "0,1")[0] == 0
    assert "difference to 0" in terminal.out and ("±" in terminal.out or "+-" in terminal.out)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("café 🙂\n", encoding="utf-8")
    before = len(terminal.out)
    assert terminal.run("generate", text_run.folder, "--prompts", prompts, "--max-new-tokens", "8")[0] == 0
    assert json.loads(terminal.out[before:])["prompt"] == "café 🙂"
    assert terminal.run("generate", text_run.folder, "über", "--max-new-tokens", "8")[0] == 0
    for command in ("generate", "experiment", "chat", "evaluate", "train"):
        assert terminal.run(command, "--help")[0] == 0
    assert terminal.run("info", "nöwhere🙂")[0] == 2


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")


@needs_full
@pytest.mark.parametrize("words", [("info", "tiny"), ("info", "tiny", "--json"), ("recipe", "--schema"), ("--help",)])
def test_a_result_that_cannot_be_written_is_an_error(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as left:
            app(list(words))
    line = capfd.readouterr().err
    assert left.value.code == 2 and line.startswith("error: ") and "No space left on device" in line and line.count("\n") == 1


def test_a_reader_that_has_gone_is_told_nothing(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as left:
            app(["info", "tiny", "--json"])
    assert left.value.code == 1 and capfd.readouterr().err == ""


@needs_fork
def test_what_was_closed_leads_nowhere(tmp_path: Path) -> None:
    """A file that takes the number of a closed stdout would get what is printed."""

    def command() -> None:
        os.close(0), os.close(1), os.close(2)
        sys.stdin = sys.stdout = sys.stderr = None  # as Python has them then
        code = app(["info", "tiny"], standalone_mode=False)
        with open(tmp_path / "file", "w", encoding="utf-8") as file:
            print("nowhere", flush=True)
            os._exit(0 if not code and file.fileno() > 2 else 1)

    child = os.fork()
    if not child:
        try:
            command()
        finally:
            os._exit(3)
    assert os.waitpid(child, 0)[1] == 0 and (tmp_path / "file").read_text(encoding="utf-8") == ""
