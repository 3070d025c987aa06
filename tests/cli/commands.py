"""Commands run in this process, and the recipe they run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from typer.testing import CliRunner

TRUNK = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "glu_width": 24, "context": 48, "window": 6, "full_every": 2}
RECIPE: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "model": {"trunk": TRUNK},
    "data": {"source": {"kind": "task"}, "length": 12},
    "feedback": {"schedule": [{"fraction": 0.5, "passes": {1: 1.0}}, {"fraction": 0.5, "passes": {2: 0.5, 3: 0.5}}]},
    "optim": {"warmup_steps": 2},
    "train": {"steps": 20, "batch_rows": 4, "device": "cpu", "checkpoint_every": 5},
    "evaluation": {"every": 10, "rows": 4, "feedback_passes": [0, 1, "exact"]},
}


class Done(NamedTuple):
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def fullband(*arguments: str | Path) -> Done:
    """Run a command in this process, without a terminal."""
    from fullband.cli.main import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def refused(*arguments: str | Path) -> str:
    """The one line with which a command refuses its arguments."""
    done = fullband(*arguments)
    assert done.code == 2, (done.out, done.err)
    assert done.out == ""
    *before, line = done.err.strip().splitlines()
    assert line.startswith("error: "), done.err
    assert not before or before[0].startswith("group"), done.err  # training may have begun
    return line


def write_recipe(folder: Path, **overrides: Any) -> Path:
    """RECIPE with overrides: `train__steps=5` sets train.steps. Its output is `folder`/run."""
    raw = copy.deepcopy(RECIPE) | {"output": str(folder / "run")}
    for key, value in overrides.items():
        *sections, leaf = key.split("__")
        node = raw
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    return path


class Trained(NamedTuple):
    """A run and the command that made it."""

    recipe: Path
    folder: Path
    done: Done


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / json.loads((run / "checkpoints" / "last.json").read_text())["checkpoint"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
