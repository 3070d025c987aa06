"""The plan of a run on hardware: what it counts, what it refuses, and communication against what processes really send."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import fullband

from fullband import planning
from fullband.config import load_recipe
from fullband.training.resolve import shape_of

COUNT = Path(__file__).parent / "count_bytes.py"
RECIPE = """
name: r
model: {trunk: {width: 64, layers: 3, heads: 4, kv_heads: 2, glu_width: 128, context: 64, window: 16, full_every: 3}}
data: {source: {kind: task}, length: 16}
feedback: {schedule: none}
train: {steps: 2, batch_rows: 8, microbatch_rows: 4, log_every: 1, device: cpu, checkpoint_every: 100}
evaluation: {rows: 0}
"""


def test_a_plan_of_the_papers_run() -> None:
    found = fullband("plan", "paper-200b", "--gpus", "64", "--json").json
    assert found["fits"] and found["memory"] and found["cost"] is None
    assert "train.microbatch_rows=64" in found["settings"] and "train.batch_rows=64" in found["settings"]
    assert found["steps"] * 64 == pytest.approx(678168 * 36, rel=1e-4)  # the same tokens
    assert found["step_seconds"] == max(found["compute_seconds"], found["communication_seconds"])


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    off = ["--set", "train.activation_checkpointing=false"]
    done = fullband("plan", "paper-200b", "--gpus", "36", "--gpu", "rtx4090", *off)
    assert done.code == 2 and "does not fit" in done.err and "train.activation_checkpointing=true" in done.err
    assert fullband("plan", "paper-200b", "--gpus", "36", "--gpu", "rtx4090").code == 0


@pytest.mark.parametrize("given", [["--gpu", "abacus"], ["--gpus", "0"], ["--mfu", "0"], ["--rows", "0"]])
def test_bad_values_are_one_line(given: list[str]) -> None:
    done = fullband("plan", "paper-200b", *given)
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1


def test_one_gpu_sends_nothing_and_scale_has_eleven_rows() -> None:
    found = fullband("plan", "standard-1t", "--scale", "--json").json
    assert [one["gpus"] for one in found] == [2**n for n in range(11)]
    assert found[0]["communication_seconds"] == 0 < found[1]["communication_seconds"]


@pytest.mark.slow
@pytest.mark.parametrize(("passes", "reshard"), [(1, True), (3, True), (3, False), (2, False)])
def test_communication_is_what_two_processes_send(tmp_path: Path, passes: int, reshard: bool) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    chosen = [
        f"feedback.schedule=[{{fraction: 1.0, passes: {{{passes}: 1.0}}}}]",
        f"parallel={{shard: 2, reshard: {str(reshard).lower()}}}",
        f"output={tmp_path / 'run'}",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(COUNT), str(path), str(tmp_path), *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    recipe = load_recipe(path, chosen)
    planned = planning.communication(shape_of(recipe), recipe, 2, passes, microbatches=2)
    assert planned["all_gather"] == ranks[0]["all_gather"] == ranks[1]["all_gather"]
    assert planned["reduce_scatter"] == ranks[0]["reduce_scatter"] == ranks[1]["reduce_scatter"]
    assert planned["normuon"] == (ranks[0]["all_to_all"] + ranks[1]["all_to_all"]) / 2
