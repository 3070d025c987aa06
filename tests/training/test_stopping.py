"""Stopping early: SIGTERM and Ctrl-C end after the step in hand; a loss that is no number ends with the last good state kept."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullband.config import Recipe
from fullband.files import read_tensors
from fullband.model import FullBandModel
from fullband.training import RunResult, train
from fullband.training import loop as loop_module
from fullband.training.loop import DivergedError
from fullband.training.metrics import read_metrics
from fullband.training.stop import stop_signals
from training.runs import assert_same_run, everything_on, in_child, last_of, left_on_disk, needs_fork, with_changes

MakeRecipe = Callable[..., Recipe]


class At:
    """A watcher that does something when `step` steps are done."""

    def __init__(self, step: int, act: Callable[[Any], None], when: str = "stepped"):
        self.step, self.act, self.when = step, act, when

    def started(self, run: Any, groups: str) -> None:
        if self.when == "started":
            self.act(run)

    def stepped(self, run: Any, values: dict[str, Any]) -> None:
        if run.step == self.step and self.when == "stepped":
            self.act(run)

    def evaluated(self, run: Any, losses: dict[str, float]) -> None: ...


def send(number: int) -> Callable[[Any], None]:
    return lambda run: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [1, 4])
def test_a_signal_saves_and_returns(recipe: MakeRecipe, number: int, step: int) -> None:
    straight, stopped = recipe("straight"), recipe("stopped")
    train(straight)
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    result = train(stopped, watcher=At(step, send(number)))
    assert (result.signal, result.steps) == (number, step)
    assert result.checkpoint == last_of(stopped.output or "") and result.checkpoint.name == f"step-{step:08d}"
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert train(stopped, resume=True).signal is None
    a, b = left_on_disk(straight.output or ""), left_on_disk(stopped.output or "")
    assert a["metrics"] == b["metrics"]
    last = "checkpoints/step-00000006/"
    assert {k: v for k, v in a["files"].items() if k.startswith(last)} == {k: v for k, v in b["files"].items() if k.startswith(last)}


def test_a_signal_between_the_save_and_the_next_step_saves_too(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes as late as it can: at the end of a step that saves nothing, when the loop is about to look."""
    config = recipe()
    calls = 0

    real = loop_module.StopRequest.__bool__

    def late(self: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == 3:
            self.signal = signal.SIGTERM
        return real(self)

    monkeypatch.setattr(loop_module.StopRequest, "__bool__", late)
    result = train(config)
    assert result.signal == signal.SIGTERM and 0 < result.steps < 6
    assert last_of(config.output or "").name == f"step-{result.steps:08d}"


def test_a_signal_before_the_first_step_leaves_something_to_resume(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module.StopRequest, "signal", signal.SIGTERM)
    result = train(recipe())
    assert (result.signal, result.steps, result.checkpoint.name) == (signal.SIGTERM, 0, "step-00000000")
    monkeypatch.undo()
    straight = recipe("straight")
    train(straight)
    train(recipe(), resume=True)
    assert left_on_disk(straight.output or "")["metrics"] == left_on_disk(recipe().output or "")["metrics"]


def test_a_signal_in_the_last_step_is_a_finished_run(recipe: MakeRecipe) -> None:
    result = train(recipe(), watcher=At(6, send(signal.SIGTERM)))
    assert (result.signal, result.steps) == (None, 6)


@needs_fork
def test_a_second_signal_ends_at_once(recipe: MakeRecipe) -> None:
    def twice(run: Any) -> None:
        send(signal.SIGINT)(run)
        send(signal.SIGINT)(run)

    end = in_child(lambda: train(recipe(), watcher=At(3, twice)))
    assert end.error.startswith("KeyboardInterrupt")


def test_another_thread_trains_without_signals(recipe: MakeRecipe) -> None:
    found: list[RunResult] = []
    thread = threading.Thread(target=lambda: found.append(train(recipe())))
    thread.start()
    thread.join()
    assert found[0].steps == 6


def test_signals_are_collected_and_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop and stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def poison(recipe: Recipe, step: int, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """From `step` on, the loss or one gradient is NaN or infinite."""
    real = loop_module.accumulate_gradients

    def poisoned(model: Any, batch: Any, at: int, *args: Any) -> Any:
        report = real(model, batch, at, *args)
        if at == step:
            if what == "loss":
                report.objective = float("nan")
            else:
                model.connection.mergers[0].state.weight.grad[0, 0] = float("inf")
                report.gradient_norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        return report

    monkeypatch.setattr(loop_module, "accumulate_gradients", poisoned)


@pytest.mark.parametrize(
    ("what", "message", "kind", "step"),
    [
        ("loss", "the loss is nan", "task", 0),
        ("gradient", "the gradient norm is (inf|nan)", "text", 8),
        ("gradient", "the gradient norm is (inf|nan)", "task", 8),
        ("loss", "the loss is nan", "text", 9),
    ],
)
def test_divergence_keeps_the_state_before_the_step(
    recipe: MakeRecipe, jsonl: str, monkeypatch: pytest.MonkeyPatch, what: str, message: str, kind: str, step: int
) -> None:
    """Once the cause is gone, the run goes on as if nothing had happened: batches and adaptive schedule (measured at 8) included."""
    source = {"kind": "task"} if kind == "task" else {"kind": "files", "paths": [jsonl], "validation_fraction": 0.2}
    options = everything_on(source)
    options["train"]["steps"] = 12
    options["feedback"]["schedule"] = [{"fraction": 1.0, "passes": {2: 0.6, 3: 0.4}}]
    straight, broken = recipe("straight", **options), recipe("broken", **options)
    train(straight)
    with monkeypatch.context() as patch:
        poison(broken, step, patch, what)
        with pytest.raises(DivergedError, match=rf"^step {step}: {message}; the state before this step is kept in .*step-0000000{step}$"):
            train(broken)
    model = FullBandModel.load(broken.output or "")
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert len([e for e in read_metrics(Path(broken.output or "") / "metrics.jsonl") if "passes" in e]) == step
    train(broken, resume=True)
    a, b = left_on_disk(straight.output or ""), left_on_disk(broken.output or "")
    assert a["metrics"] == b["metrics"]
    last = [{k: v for k, v in files.items() if "step-00000012" in k} for files in (a["files"], b["files"])]
    assert last[0] == last[1] and len(last[0]) >= 6


def test_the_same_divergence_again_is_said_again(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe()
    poison(config, 3, monkeypatch, "loss")
    for resume in (False, True, True):
        with pytest.raises(DivergedError, match=r"^step 3: the loss is nan"):
            train(config, resume=resume)
    assert last_of(config.output or "").name == "step-00000003"


def test_parameters_that_overflowed_are_not_called_good(recipe: MakeRecipe) -> None:
    """An update made a weight infinite: the loss of the next step is NaN, and its weights are not worth keeping."""
    config = recipe(train__checkpoint_every=2)

    def overflow(run: Any) -> None:
        with torch.no_grad():
            run.model.trunk.blocks[0].glu.up.weight[0, 0] = float("inf")

    with pytest.raises(DivergedError, match=r"^step 3: .*the parameters are not finite either; the last good state is .*step-00000002"):
        train(config, watcher=At(3, overflow))
    tensors = read_tensors(last_of(config.output or "") / "model.safetensors")
    assert all(bool(t.isfinite().all()) for t in tensors.values())
    straight = recipe("straight", train__checkpoint_every=2)
    train(straight)
    train(config, resume=True)
    assert_same_run(straight.output or "", config.output or "")


def test_a_run_that_really_diverges_is_stopped(recipe: MakeRecipe) -> None:
    """No injection: a learning rate that no float32 survives."""
    config = recipe(train__steps=30, optim={"matrix_lr": 1e38, "adam_lr": 1e38, "warmup_steps": 0}, train__checkpoint_every=1)
    with pytest.raises(DivergedError, match=r"^step \d+: the (loss|gradient norm) is (nan|inf)"):
        train(config)
    last = with_changes(config).output
    for tensor in read_tensors(last_of(last or "") / "model.safetensors").values():
        assert not tensor.isnan().any()
