"""One miniature quickstart for all tests: everything real, only small and short. It runs over the remains of an earlier one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fullband.quickstart import quickstart

MINIATURE = (
    "train.steps=8",
    "train.batch_rows=4",
    "train.log_every=1",
    "optim.warmup_steps=2",
    "evaluation.rows=2",
    "model.trunk.width=16",
    "model.trunk.glu_width=16",
)


@dataclass(frozen=True)
class Miniature:
    output: Path
    result: dict[str, Any]
    printed: str


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Miniature:
    output = tmp_path_factory.mktemp("runs") / "quickstart"
    for name in ("standard", "fullband"):
        leave_remains(output / name)
    (output / "notes.txt").write_text("mine")
    console = Console(width=100, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    result = quickstart(seed=3, output=output, overrides=MINIATURE, rows=8, console=console)
    return Miniature(output, result, console.export_text())


def leave_remains(folder: Path) -> None:
    """What an earlier quickstart might have left."""
    (folder / "checkpoints" / "step-00000099").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"name: quickstart-{folder.name}\n")
    (folder / "metrics.jsonl").write_text("not even JSON\n")
