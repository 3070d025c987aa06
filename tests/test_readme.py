"""What the README shows works: the Python block runs, the commands exist, the public names are what they say."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import fullband
from cli.commands import fullband as fullband_command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_public_names_are_functions_and_classes() -> None:
    for name in fullband.__all__:
        assert not isinstance(getattr(fullband, name), types.ModuleType), f"fullband.{name} is hidden by a subpackage"


@pytest.mark.slow
def test_the_python_block_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    small = f'["train.steps=3", "evaluation.rows=2", "output={tmp_path.as_posix()}/run"]'
    script = block.replace('load_recipe("recipes/tiny-text.yaml")', f'load_recipe("recipes/tiny-text.yaml", {small})')
    assert script != block
    done = subprocess.run(
        [sys.executable, "-c", script + "\nprint(tuple(logits.shape))"], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("(1, 10, 257)")


def test_the_commands_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = set(re.findall(r"^    fullband ([\w-]+)", README, re.MULTILINE))
    assert {"train", "info", "generate", "evaluate-loss"} <= commands
    monkeypatch.setenv("COLUMNS", "200")  # help is cut to the terminal
    for command in sorted(commands):
        done = fullband_command(command, "--help")
        assert done.code == 0, f"{command}: {done.err}"
        for option in re.findall(rf"fullband {command} .*?(?:$|#)", README, re.MULTILINE):
            for flag in re.findall(r"--[\w-]+", option):
                assert flag in done.out, f"{command} {flag}"
