"""Terminals that have not every character: what was found is written, in other words."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from cli.commands import Trained
from fullband.cli.console import output, print_json, spell_what_cannot_be_written
from fullband.cli.main import app

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
