"""Training in a process of its own, stopped by signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.commands import checkpoint_of, fullband
from fullband.model import FullBandModel

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)])
def test_a_signal_saves_the_run_and_resume_completes_it(recipe: Callable[..., Path], tmp_path: Path, number: int, code: int) -> None:
    path = recipe(train__steps=100_000, train__checkpoint_every=100_000, train__log_every=1, evaluation={"rows": 0})
    command = [sys.executable, "-c", "from fullband.cli.main import main; main()", "train", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert f"stopped by {number.name}" in err and f"fullband train {path} --resume" in err and "Traceback" not in err
    checkpoint = checkpoint_of(tmp_path / "run")
    FullBandModel.load(checkpoint)
    steps = int(checkpoint.name.removeprefix("step-")) + 3
    done = fullband("train", path, "--set", f"train.steps={steps}", "--resume", "--json")
    assert done.code == 0 and done.json["complete"] and done.json["steps"] == steps
