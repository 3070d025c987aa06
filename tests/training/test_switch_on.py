"""Feedback switched on: at any step, from any checkpoint, the fusion first; the shock and the crossover."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullband.config import Recipe
from fullband.feedback.loss import PassLoss, token_losses
from fullband.feedback.multipass import Jitter, multipass_reference
from fullband.files import read_tensors
from fullband.layout import Layout
from fullband.model import FullBandModel
from fullband.training import train
from fullband.training.metrics import read_metrics
from fullband.training.milestones import Milestones
from fullband.training.run import prepare
from fullband.training.step import StepReport
from training.runs import last_of, with_changes

MakeRecipe = Callable[..., Recipe]


def entries(recipe: Recipe) -> list[dict[str, Any]]:
    return read_metrics(Path(recipe.output or "") / "metrics.jsonl")


@pytest.mark.parametrize("start", [0, 1, 4, 9])
def test_feedback_starts_where_the_recipe_says(recipe: MakeRecipe, start: int) -> None:
    config = recipe(feedback__start_step=start)
    result = train(config)
    assert [entry["passes"] for entry in entries(config)] == [1] * min(start, 6) + [2] * max(0, 6 - start)
    assert result.milestones.switch_on_step == (start if start < 6 else None)
    assert (result.milestones.shock is None) == (start >= 6)


def test_validation_reads_with_feedback_only_once_it_is_trained(recipe: MakeRecipe) -> None:
    config = recipe(feedback__start_step=3, evaluation={"every": 1, "rows": 2, "feedback_passes": [0, 1, "exact"]})
    train(config)
    read = [list(entry["validation"]) for entry in entries(config) if "validation" in entry]
    assert read == [["0"]] * 3 + [["0", "1", "exact"]] * 3


def test_a_fine_tune_can_be_evaluated_before_its_first_step(recipe: MakeRecipe) -> None:
    """Once, as step -1, with the recipe's passes; a resumed run does not do it again."""
    config = recipe(evaluation={"every": 4, "rows": 2, "feedback_passes": [0, 1], "at_start": True}, model__fusion="residual")
    train(with_changes(config, train__steps=3))
    train(config, resume=True)
    evaluated = [entry for entry in entries(config) if "validation" in entry]
    assert [entry["step"] for entry in evaluated] == [-1, 2, 3, 5]
    assert evaluated[0]["validation"]["0"] == pytest.approx(evaluated[0]["validation"]["1"], abs=1e-5)


def test_a_run_from_a_plain_checkpoint_starts_with_its_weights(recipe: MakeRecipe) -> None:
    plain = recipe("plain", feedback__schedule="none", train__steps=5)
    train(plain)
    config = recipe("fused", train__initial_checkpoint=plain.output, feedback__schedule="three-pass", train__steps=2, seed=8)
    run = prepare(config, resume=False)
    for name, tensor in FullBandModel.load(plain.output or "").state_dict().items():
        assert torch.equal(run.model.state_dict()[name], tensor), name
    assert not any(tensor.any() for tensor in run.optimizer.state_dict().values())  # a new optimizer
    train(config)
    assert [entry["passes"] for entry in entries(config)] == [3, 3]
    by_folder = with_changes(config, output=f"{config.output}-2", train__initial_checkpoint=str(last_of(plain.output or "")))
    train(by_folder)
    assert [entry["objective"] for entry in entries(config)] == [entry["objective"] for entry in entries(by_folder)]


def test_an_initial_checkpoint_of_another_shape_is_refused(recipe: MakeRecipe) -> None:
    plain = recipe("plain", feedback__schedule="none", train__steps=1)
    train(plain)
    wide = {**plain.model.trunk, "width": 32, "window": 9}
    with pytest.raises(ValueError, match=r"plain: not the recipe's model \(width: 16 there, 32 in the recipe, window: 6 there, 9 in"):
        train(recipe("wide", model__trunk=wide, train__initial_checkpoint=plain.output))
    with pytest.raises(ValueError, match="no such model folder"):
        train(recipe("none", train__initial_checkpoint=f"{plain.output}-none"))


def tensors_at(recipe: Recipe, step: int) -> dict[str, Tensor]:
    folder = Path(recipe.output or "") / "checkpoints" / f"step-{step:08d}"
    model = read_tensors(folder / "model.safetensors")
    return model | {f"optimizer {name}": t for name, t in read_tensors(folder / "optimizer.safetensors").items()}


@pytest.mark.parametrize("clip", [None, 0.1])
def test_fusion_warmup_trains_the_fusion_and_nothing_else(recipe: MakeRecipe, clip: float | None) -> None:
    config = recipe(
        feedback={"schedule": [{"fraction": 1.0, "passes": {2: 1.0}}], "start_step": 2, "fusion_warmup": 2},
        optim={"warmup_steps": 2, "clip_norm": clip},
        train__checkpoint_every=1,
        train__keep_checkpoints=9,
    )
    train(config)
    moved = []
    for step in range(1, 6):
        before, after = tensors_at(config, step), tensors_at(config, step + 1)
        moved.append({name for name in before if not torch.equal(before[name], after[name])})
    fusion = {name for name in tensors_at(config, 1) if ".connection." in f".{name.removeprefix('optimizer ')}"}
    everything = set(tensors_at(config, 1))
    assert len(fusion) == 6  # two matrices, and of each its momentum and second moment
    assert moved[0] == everything - fusion  # step 1: plain, the fusion is not even decayed
    assert moved[1] == moved[2] == fusion
    assert moved[3] == moved[4] == everything


def losses_by_hand(recipe: Recipe, checkpoint: Path | None, step: int) -> tuple[float, float]:
    """(L2, L1) over the fused positions of `step`'s batch, with the weights of `checkpoint` (None: the initial ones)."""
    run = prepare(with_changes(recipe, output=f"{recipe.output}-by-hand"), resume=False)
    model = run.model if checkpoint is None else FullBandModel.load(checkpoint)
    for _ in range(step + 1):
        batch = run.loader.next_batch()
    rows = torch.arange(batch.shape[0])
    (prefix,) = run.schedule.prefixes(step, 0, 2, batch.shape[1], rows)
    jitter = Jitter(recipe.feedback.jitter, recipe.seed, step, rows)
    outputs = multipass_reference(model, batch.tokens, [prefix], Layout(batch.positions, batch.documents), jitter)
    means = []
    for output in (outputs[1], outputs[0]):
        nll, _ = token_losses(
            output.states[:, prefix + 1 :].flatten(0, 1), model.trunk.head_weight, batch.targets[:, prefix + 1 :].flatten()
        )
        means.append(float(nll.mean().detach()))
    return means[0], means[1]


@pytest.mark.parametrize("start", [0, 3])
def test_the_shock_is_the_difference_at_the_switch(recipe: MakeRecipe, start: int) -> None:
    config = recipe(feedback__start_step=start, train__checkpoint_every=1, train__keep_checkpoints=9)
    result = train(config)
    before = Path(config.output or "") / "checkpoints" / f"step-{start:08d}" if start else None
    fused, plain = losses_by_hand(config, before, start)
    assert abs(fused - plain) > 1e-3
    assert result.milestones.shock == pytest.approx(fused - plain, abs=1e-5)
    entry = entries(config)[start]
    assert (entry["fused_pass_2"], entry["plain_there_2"]) == pytest.approx((fused, plain), abs=1e-5)
    assert (entry["switch_on_step"], entry["switch_on_shock"]) == (start, result.milestones.shock)


def test_the_residual_entry_starts_without_a_shock(recipe: MakeRecipe) -> None:
    config = recipe(model__fusion="residual", feedback__jitter=0.5, feedback__start_step=1, train__steps=3)
    result = train(config)
    assert result.milestones.shock == pytest.approx(0, abs=1e-6)
    assert abs(entries(config)[-1]["fused_pass_2"] - entries(config)[-1]["plain_there_2"]) > 1e-6  # and then the entry opens


def report(fused: float, plain: float, count: int = 2, passes: int = 2) -> StepReport:
    """A step whose passes lost `fused` and `plain` (means) over `count` fused positions."""

    def pass_loss(k: int) -> PassLoss:
        sums = [torch.tensor(x) for x in (0.0, 4.0, fused * count if k > 1 else 0.0, float(count) if k > 1 else 0.0, plain * count)]
        return PassLoss(*sums)

    return StepReport(passes, tokens=4, sums=[pass_loss(k) for k in range(1, passes + 1)])


def test_the_crossover_is_where_the_running_mean_falls_below() -> None:
    """By hand: the mean starts at the shock and moves a tenth of the way at every step that feeds back; ten of them are enough."""
    milestones = Milestones()
    milestones.update(6, report(0.0, 1.0, passes=1))
    assert milestones == Milestones()
    differences = [(7, 1.0), *((step, -0.1) for step in range(20, 32, 2)), (40, -2.0), (41, -2.0), (44, -2.0), (45, -2.0), (46, 9.0)]
    mean = 1.0
    means = []
    for step, difference in differences:
        milestones.update(step, report(3.0 + difference, 3.0))
        mean = difference if step == 7 else 0.9 * mean + 0.1 * difference
        means.append(mean)
        milestones.update(step, report(0.0, 9.0, passes=1))  # plain steps say nothing
    assert [m < 0 for m in means] == [False] * 9 + [True, True, False]
    assert (milestones.switch_on_step, milestones.shock, milestones.crossover_step) == (7, pytest.approx(1.0), 44)
    assert milestones.mean_difference == pytest.approx(means[-1])


def test_noise_around_no_shock_is_no_crossover() -> None:
    """The residual fusion starts with no shock: the sign of the first differences says nothing."""
    milestones = Milestones()
    for step in range(9):
        milestones.update(step, report(2.99, 3.0))
    assert milestones.crossover_step is None
    milestones.update(9, report(2.99, 3.0))
    assert milestones.crossover_step == 9


def test_a_step_with_no_scored_fused_position_is_not_the_switch() -> None:
    milestones = Milestones()
    milestones.update(4, report(0.0, 0.0, count=0))
    assert milestones == Milestones()


def test_milestones_survive_their_state() -> None:
    milestones = Milestones(7, 0.25, None, 0.125)
    assert Milestones.from_state(milestones.state_dict()) == milestones


def test_an_unsettled_model_never_gets_fewer_deep_passes_than_its_recipe(recipe: MakeRecipe) -> None:
    """The adaptive share starts from the recipe's own and rises while a random model does not settle (and is logged when measured)."""
    schedule = [{"fraction": 1.0, "passes": {2: 0.6, 3: 0.4}}]
    config = recipe(
        data__length=20,
        feedback={"schedule": schedule, "adaptive": {"every": 2, "passes": 8, "rows": 2, "tolerance": 1e-9, "ratio": 1e-3, "growth": 1.1}},
        train__log_every=100,
    )
    train(config)
    shares = [entry["deeper_share"] for entry in entries(config) if "deeper_share" in entry]
    assert shares == pytest.approx([0.44, 0.484, 0.5])
