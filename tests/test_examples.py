"""The example of reinforcement learning runs: server, rollouts, weight updates, report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo.py"


@pytest.mark.slow(minutes=1)
def test_grpo_samples_from_the_server_and_updates_its_weights(tmp_path: Path) -> None:
    for needed in ("trl", "datasets", "uvicorn"):
        pytest.importorskip(needed)
    found = tmp_path / "found.json"
    few = ["--tuning-steps", "30", "--steps", "2", "--prompts", "2", "--problems", "8", "--learning-rate", "3e-3", "--answer-passes", "2"]
    command = [sys.executable, str(EXAMPLE), *few, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    result = json.loads(found.read_text())
    assert len(result["history"]) == 2 and "after  soft     (trained)" in done.stdout
    for when in ("before", "after"):
        rows = {row["answer_passes"]: row for row in result[when]["soft"]["mismatch"]}
        assert result[when]["soft"]["answers"] == 32
        assert rows["exact"]["largest"] < 1e-4 < rows[0]["largest"], "after training the server has the policy's weights"
    done = subprocess.run([sys.executable, str(EXAMPLE), "--table", str(found)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "| soft | 1 (0) |" in done.stdout, done.stderr
