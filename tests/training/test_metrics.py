"""What a run logs: the WSD learning rates, the z-loss in the cooldown only, compute, and where the numbers go."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullband.cli.train import plan_of
from fullband.config import Recipe
from fullband.training import loop as loop_module
from fullband.training import train
from fullband.training.metrics import JsonLines, open_trackers, read_metrics

MakeRecipe = Callable[..., Recipe]


def entries(recipe: Recipe) -> list[dict[str, Any]]:
    return read_metrics(Path(recipe.output or "") / "metrics.jsonl")


def test_learning_rates_follow_warm_up_stable_and_decay(recipe: MakeRecipe) -> None:
    """Twelve steps by hand: three up, five constant, four down to zero at the end that is not executed."""
    config = recipe(train__steps=12, optim={"warmup_steps": 3, "cooldown": 1 / 3, "matrix_lr": 0.01, "adam_lr": 0.004})
    train(config)
    factor = [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert [entry["matrix_lr"] for entry in entries(config)] == pytest.approx([0.01 * f for f in factor])
    assert [entry["adam_lr"] for entry in entries(config)] == pytest.approx([0.004 * f for f in factor])


def test_the_logged_learning_rate_is_the_one_applied(recipe: MakeRecipe) -> None:
    """Adam's first step moves every weight by its learning rate: a quarter of the maximum, in a warm-up of four steps."""
    config = recipe(train__steps=12, optim={"warmup_steps": 4, "cooldown": 0.5, "adam_lr": 0.2}, feedback__schedule="none")
    seen: list[tuple[float, float]] = []

    class Watch:
        before: torch.Tensor

        def started(self, run: Any, groups: str) -> None:
            self.before = run.model.trunk.final_norm.weight.detach().clone()

        def stepped(self, run: Any, values: dict[str, Any]) -> None:
            if run.step == 1:
                moved = (run.model.trunk.final_norm.weight.detach() - self.before).abs()
                seen.append((float(moved.median()), values["adam_lr"]))

        def evaluated(self, run: Any, losses: dict[str, float]) -> None: ...

    train(config, watcher=Watch())
    ((moved, logged),) = seen
    assert moved == pytest.approx(logged, rel=1e-3) and logged == 0.05


def test_the_z_loss_is_on_in_the_cooldown_only(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    real = loop_module.accumulate_gradients
    monkeypatch.setattr(loop_module, "accumulate_gradients", lambda *args: given.append(args[5]) or real(*args))
    config = recipe(train__steps=8, optim={"warmup_steps": 2, "cooldown": 0.25, "z_loss": 0.1})
    train(config)
    assert given == [0.0] * 6 + [0.1] * 2
    for entry in entries(config):
        plain = entry["loss_pass_1"] + entry["loss_pass_2"]
        extra = entry["objective"] - plain
        assert extra == pytest.approx(0, abs=1e-5) if entry["step"] < 6 else extra > 0.1 * math.log(6) ** 2


def test_compute_is_counted_as_the_paper_does(recipe: MakeRecipe) -> None:
    config = recipe(feedback__schedule="three-pass", feedback__start_step=2, feedback__prefix="off", train__steps=4)
    result = train(config)
    logged = [(e["tokens"], e["token_equivalent_compute"], e["executed_positions"]) for e in entries(config)]
    # 4 rows of 12; without a prefix only position 0 of the later passes is not computed again
    assert logged == [(48, 48, 48), (96, 96, 96), (144, 240, 96 + 48 + 2 * 44), (192, 384, 96 + 2 * (48 + 2 * 44))]
    assert (result.tokens, result.token_equivalent, result.executed_positions) == logged[-1]


def test_steps_are_logged_when_asked_and_at_the_end(recipe: MakeRecipe) -> None:
    config = recipe(train__steps=7, train__log_every=3, evaluation={"every": 2, "rows": 2, "feedback_passes": [0]})
    result = train(config)
    assert [e["step"] for e in entries(config) if "objective" in e] == [2, 5, 6]
    assert [e["step"] for e in entries(config) if "validation" in e] == [1, 3, 5, 6]
    assert entries(config)[-1]["validation"] == result.validation


def test_without_held_out_rows_nothing_is_validated(recipe: MakeRecipe) -> None:
    config = recipe(evaluation={"rows": 0, "every": 1})
    assert train(config).validation == {}
    assert not any("validation" in entry for entry in entries(config))
    assert not (Path(config.output or "") / "checkpoints" / "best.json").exists()


def test_metrics_of_an_abandoned_start_are_forgotten(recipe: MakeRecipe) -> None:
    """A run that was killed before its first checkpoint begins again, and so do its metrics."""
    config = recipe(train__steps=2, evaluation={"rows": 2, "feedback_passes": [0], "at_start": True})
    Path(config.output or "").mkdir()
    before = '{"step": -1, "validation": {"0": 9}}\ndamage\n{"step": 0, "objective": 9}\n{"step": 1, "obj'
    (Path(config.output or "") / "metrics.jsonl").write_text(before, encoding="utf-8")
    train(config)
    assert [entry["step"] for entry in entries(config)] == [-1, 0, 1, 1]


def test_only_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    """Damage elsewhere is named: a resumed run would write the file again without all that comes behind it."""
    path, lines = tmp_path / "metrics.jsonl", [f'{{"step": {i}}}\n' for i in range(4)]
    path.write_text("".join([*lines, '{"step": 4, "obj']))
    assert [entry["step"] for entry in read_metrics(path)] == [0, 1, 2, 3]
    JsonLines(tmp_path, drop_from=3)
    assert path.read_text() == "".join(lines[:3])
    for content, message in (
        ([lines[0], "dam\n", *lines[2:]], r"metrics\.jsonl:2: damaged; remove the line"),
        ([*lines[:3], '{"step": 3, "obj\n'], r"metrics\.jsonl:4: damaged"),
        ([lines[0], '{"step": "1"}\n', *lines[2:]], r"metrics\.jsonl:2: no entry of a run"),
    ):
        path.write_text("".join(content))
        for read in (lambda: read_metrics(path), lambda: JsonLines(tmp_path, drop_from=3)):
            with pytest.raises(ValueError, match=message):
                read()
        assert path.read_text() == "".join(content)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named_by_the_metrics(tmp_path: Path) -> None:
    tracker = JsonLines(tmp_path, drop_from=0)
    tracker.path.unlink()
    tracker.path.symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
        tracker.log(0, {"objective": 1.0})
    tracker.close()


def test_tensorboard_gets_steps_and_validation(recipe: MakeRecipe) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"train__tracker": "tensorboard", "evaluation": {"every": 2, "rows": 2, "feedback_passes": [0, 1]}}
    config = recipe(train__steps=4, **options)
    train(recipe(train__steps=3, **options))
    train(config, resume=True)
    events = EventAccumulator(str(Path(config.output or "") / "tensorboard"))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("objective")]
    assert logged == [(e["step"], pytest.approx(e["objective"])) for e in entries(config) if "objective" in e]
    validation = [(event.step, event.value) for event in events.Scalars("validation/1")]
    assert validation == [(e["step"], pytest.approx(e["validation"]["1"])) for e in entries(config) if "validation" in e]


@pytest.mark.parametrize(("tracker", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_tracker_is_one_line(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tracker: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = recipe(train__tracker=tracker)
    for start in (plan_of, train):
        with pytest.raises(ValueError, match=rf"train\.tracker: {tracker} is not installed; pip install 'fullband\[track\]'"):
            start(config)
    assert not config.folder.exists()
    assert train(recipe()).steps == 6  # nothing is in the way of a start without it


def test_weights_and_biases_gets_what_metrics_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in: the real one needs an account."""

    class Wandb:
        logged: list[tuple[int, dict[str, Any]]] = []  # noqa: RUF012
        finished = False

        def init(self, **settings: Any) -> Any:
            assert settings["config"] == {"seed": 1} and settings["name"] == "tiny"
            return self

        def log(self, values: dict[str, Any], step: int) -> None:
            self.logged.append((step, values))

        def finish(self) -> None:
            self.finished = True

    stand_in = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    trackers = open_trackers("wandb", tmp_path, "tiny", {"seed": 1}, drop_from=0)
    for tracker in trackers:
        tracker.log(3, {"objective": 1.5})
        tracker.close()
    assert stand_in.logged == [(3, {"objective": 1.5})] and stand_in.finished
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3, "objective": 1.5}]


def test_every_line_is_json_that_others_read(recipe: MakeRecipe) -> None:
    config = recipe()
    train(config)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in (Path(config.output or "") / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=refuse)
