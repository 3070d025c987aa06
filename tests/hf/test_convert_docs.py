"""docs/convert.md works when pasted: its commands and its Python, on a tiny model in place of the one on the hub."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.commands import fullband
from hf.sources import write_source

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a README.md to read, and `source`, the tiny model."""
    write_source(tmp_path / "source")
    (tmp_path / "README.md").write_text("some text to read", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_the_commands_run(elsewhere: Path) -> None:
    block = PAGE.split("\n\n", 3)[2]
    lines = [shlex.split(line) for line in block.splitlines()]
    assert [line[1] for line in lines] == ["convert", "info", "evaluate-loss", "generate", "chat", "detach"]
    for _, *arguments in lines:
        done = fullband(*[argument.replace(SOURCE, "source") for argument in arguments])
        assert done.code == 0, (arguments, done.err)
    assert (elsewhere / "smollm2-again" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_python_runs(elsewhere: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert SOURCE in block and len([line for line in block.splitlines() if line]) == 10
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", block.replace(SOURCE, "source")], capture_output=True, text=True, env=environment, cwd=elsewhere, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ", 1)[0] in ("standard", "soft", "fused"))
    assert said["standard"] == said["soft"] == said["fused"]
    assert (elsewhere / "smollm2-fullband" / "model.safetensors").is_file()
