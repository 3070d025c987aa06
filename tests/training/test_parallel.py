"""Runs that are cut over processes: the same numbers as one process, whatever their number; and what ends with them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fullband.config import Recipe
from fullband.files import read_tensors
from fullband.training.metrics import read_metrics
from fullband.training.parallel import check_processes
from training.runs import everything_on

RANK = Path(__file__).with_name("rank.py")
UNEVEN = {"width": 18, "layers": 2, "heads": 3, "kv_heads": 1, "glu_width": 26, "context": 64, "window": 6, "full_every": 2}
EVERYTHING = {
    "model": {"trunk": UNEVEN},  # rows that 4 does not divide, and head gates of fewer rows than ranks
    "feedback__schedule": [{"fraction": 0.2, "passes": {1: 1.0}}, {"fraction": 0.8, "passes": {1: 0.2, 2: 0.4, 3: 0.4}}],
    "feedback__jitter": 0.02,
    "optim__clip_norm": 0.5,
    "optim__cooldown": 0.5,
    "optim__z_loss": 1e-3,
    "optim__matrix_lr": 1e-3,  # training steps amplify rounding: at larger rates by more
    "train__steps": 20,
    "train__batch_rows": 8,
    "train__microbatch_rows": 4,
    "train__activation_checkpointing": True,
    "train__checkpoint_every": 10,
    "train__keep_checkpoints": 9,
    "evaluation__rows": 4,
    "evaluation__every": 10,
    "evaluation__batch_rows": 4,
}


class Ranks:
    """The processes of a run, started as torchrun starts them."""

    def __init__(self, recipe: Recipe, world: int, *words: str) -> None:
        path = Path(f"{recipe.folder}.yaml")
        path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")), encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(RANK), str(path), *words],
                env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def end(self, seconds: float = 180) -> list[tuple[int, str]]:
        """(exit code, stderr) of each rank."""
        until = time.monotonic() + seconds
        try:
            errors = [process.communicate(timeout=max(1, until - time.monotonic()))[1] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [(process.returncode, error) for process, error in zip(self.processes, errors, strict=True)]


def run(recipe: Recipe, world: int, *words: str) -> dict[str, torch.Tensor]:
    """The last checkpoint's tensors of a run on `world` processes."""
    for code, error in Ranks(recipe, world, *words).end():
        assert code == 0, error
    return tensors(recipe)


def tensors(recipe: Recipe) -> dict[str, torch.Tensor]:
    last = recipe.folder / "checkpoints" / json.loads((recipe.folder / "checkpoints" / "last.json").read_text())["checkpoint"]
    return {name: t for file in ("model.safetensors", "optimizer.safetensors") for name, t in read_tensors(last / file).items()}


def losses(recipe: Recipe) -> list[float]:
    entries = read_metrics(recipe.folder / "metrics.jsonl")
    return [value for e in entries for key, value in e.items() if key.startswith(("loss_pass", "fused_pass", "objective", "gradient_norm"))]


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


Make = Callable[..., Recipe]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "cut"), [(2, {"shard": 2}), (4, {"shard": 4, "reshard": False}), (4, {"shard": 2, "replicate": 2})])
def test_a_sharded_run_equals_one_process(recipe: Make, world: int, cut: dict[str, Any]) -> None:
    one, many = recipe("one", **EVERYTHING), recipe("many", **EVERYTHING, parallel=cut)
    alone, together = run(one, 1, "float64"), run(many, world, "float64")
    assert alone["trunk.embedding.weight"].dtype == torch.float64
    assert furthest(alone, together) < 1e-10
    assert losses(one) == pytest.approx(losses(many), abs=1e-10) and len(losses(one)) > 60
    validations = [[e["validation"] for e in read_metrics(r.folder / "metrics.jsonl") if "validation" in e] for r in (one, many)]
    assert validations[0][-1] == pytest.approx(validations[1][-1], abs=1e-10) and set(validations[0][-1]) == {"0", "1", "2"}
    drawn = [json.loads(Path(f"{many.folder}.rank-{rank}.json").read_text()) for rank in range(world)]
    assert all(d == json.loads(Path(f"{one.folder}.rank-0.json").read_text()) for d in drawn)  # passes and every p: law 7
    assert {d[2] for d in drawn[0]} == {1, 2, 3}


@pytest.mark.slow
def test_float32_agrees_within_rounding(recipe: Make) -> None:
    one, many = recipe("one", **EVERYTHING), recipe("many", **EVERYTHING, parallel={"shard": 2})
    assert furthest(run(one, 1), run(many, 2)) < 2e-4
    assert losses(one) == pytest.approx(losses(many), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "lfm2"])  # lfm2: recurrent layers, pass 1 in pieces
def test_a_converted_model_is_cut_too(recipe: Make, tmp_path: Path, jsonl: str, family: str) -> None:
    """Hugging Face models train in float32: within rounding. Resumed on one process from what two have saved."""
    from training.test_converted import source_of

    source = str(source_of(family, tmp_path / family))
    changes = EVERYTHING | {
        "model": {"source": source},
        "data": {"source": {"kind": "files", "paths": [jsonl]}, "length": 20, "packing": family == "llama"},
        "train__activation_checkpointing": False,
        "train__steps": 8,
        "train__checkpoint_every": 4,
        "optim": {"kind": "adam", "adam_lr": 1e-4, "warmup_steps": 2, "clip_norm": 0.5},
    }
    one, many = recipe("one", **changes), recipe("many", **changes)
    alone, together = run(one, 1), run(many, 2)
    assert alone.keys() == together.keys()  # tied weights are one tensor in both
    assert losses(one) == pytest.approx(losses(many), abs=2e-4) and len(losses(one)) > 20
    checkpoints = many.folder / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000008")
    (checkpoints / "last.json").unlink()
    again = run(many, 1, "resume")
    assert max(float((again[name].double() - alone[name].double()).abs().max()) for name in alone) < 1e-3


@pytest.mark.slow
def test_packed_text_with_everything_on(recipe: Make, jsonl: str) -> None:
    """Fusion warm-up, an adaptive schedule, and rows of which each rank has another number of targets."""
    changes = everything_on({"kind": "files", "paths": [jsonl]})
    one, many = recipe("one", **changes), recipe("many", **changes)
    alone, together = run(one, 1, "float64"), run(many, 2, "float64")
    assert furthest(alone, together) < 1e-8  # 20 steps at ten times the rate above
    assert losses(one) == pytest.approx(losses(many), abs=1e-8)


@pytest.mark.slow
def test_saved_on_four_ranks_resumed_on_one_and_two(recipe: Make) -> None:
    straight = run(recipe("straight", **EVERYTHING), 1, "float64")
    for world in (1, 2):
        many = recipe(f"to-{world}", **EVERYTHING)
        first = Ranks(many, 4, "float64", "term-2").end()
        assert [code for code, _ in first] == [0] * 4, first  # SIGUSR1 at one rank: all of them save, after the same step
        assert json.loads((many.folder / "checkpoints" / "last.json").read_text())["checkpoint"] == "step-00000004"
        assert furthest(straight, run(many, world, "float64", "resume")) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "said"),
    [("kill-1", "rank 1 of 2 has died"), ("hang-1", "rank 1 of 2 hangs at training/rank.py"), ("fail-1", "rank 1 of 2 failed")],
)
def test_what_ends_one_rank_ends_the_others_and_is_named(recipe: Make, word: str, said: str) -> None:
    made = recipe("run", **EVERYTHING | {"parallel": {"shard": 2, "timeout": 6}, "train__checkpoint_every": 3})
    ranks = Ranks(made, 2, word)
    ended = ranks.end(90)
    assert all(code for code, _ in ended), ended
    assert said in ended[0][1] and "--resume" in ended[0][1], ended
    assert "Traceback" not in ended[0][1].partition("error:")[2]
    assert json.loads((made.folder / "checkpoints" / "last.json").read_text())["checkpoint"] == "step-00000003"


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before(recipe: Make) -> None:
    settings = EVERYTHING | {"train__steps": 8, "train__checkpoint_every": 3}
    straight = run(recipe("straight", **settings), 2, "float64")
    made = recipe("run", **settings)
    ended = Ranks(made, 2, "float64", "save-0").end(90)
    assert all(code for code, _ in ended), ended
    assert sorted(p.name for p in (made.folder / "checkpoints").glob("*step-*")) == [".step-00000006.partial", "step-00000003"]
    assert furthest(straight, run(made, 2, "float64", "resume")) == 0


@pytest.mark.slow
def test_prefixes_of_their_own_in_every_row(recipe: Make) -> None:
    settings = EVERYTHING | {"feedback__prefix": "per-row", "train__steps": 6}
    assert furthest(run(recipe("one", **settings), 1, "float64"), run(recipe("many", **settings), 2, "float64")) < 1e-10


@pytest.mark.slow
def test_what_every_rank_fails_with_is_said_once_and_keeps_the_state(recipe: Make) -> None:
    made = recipe("run", **EVERYTHING)
    ended = Ranks(made, 2, "fail-all").end(90)
    assert [code for code, _ in ended] == [2, 2]
    assert "the data are gone; training up to step 3 is kept in" in ended[0][1] and not ended[1][1], ended


@pytest.mark.slow
def test_a_folder_belongs_to_one_run(recipe: Make) -> None:
    from fullband.files import alone_in

    made = recipe("run", **EVERYTHING)
    made.folder.mkdir()
    with alone_in(made.folder):
        ended = Ranks(made, 2).end(60)
    assert [code for code, _ in ended] == [2, 2] and "another process is at work there" in ended[0][1] and not ended[1][1]


@pytest.mark.slow
def test_torchrun_starts_the_command_and_one_rank_speaks(recipe: Make) -> None:
    path = Path(f"{(made := recipe('run', train__batch_rows=6, evaluation__rows=4)).folder}.yaml")
    path.write_text(yaml.safe_dump(made.model_dump(mode="json")), encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

    def launched(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*launcher, str(processes), "-m", "fullband", "train", str(path), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    refused = launched(4)
    assert (
        refused.returncode
        and refused.stderr.count("error: train.batch_rows: must be a multiple of the number of processes (4), got 6") == 1
    )
    ended = launched(2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("validation loss by feedback passes") == 1 and ended.stderr.count("step 6/6") == 1
    assert json.loads(launched(2, "--resume", "--json").stdout)["complete"]


def test_a_number_of_processes_that_does_not_divide_is_refused(recipe: Make) -> None:
    with pytest.raises(ValueError, match=r"^parallel: shard 4 x replicate 1 needs 4 processes, got 2: torchrun --nproc-per-node 4"):
        check_processes(recipe(parallel={"shard": 4}), 2)
    with pytest.raises(ValueError, match=r"^train.batch_rows: must be a multiple of the number of processes \(3\), got 4$"):
        check_processes(recipe(), 3)
    with pytest.raises(ValueError, match=r"^train.microbatch_rows: must be a multiple of the number of processes \(4\), got 2$"):
        check_processes(recipe(train__microbatch_rows=2), 4)
    with pytest.raises(ValueError, match="shuffled"):
        check_processes(recipe(feedback__control="shuffled"), 2)
    check_processes(recipe(), 2)
