"""One step's gradients do not depend on the microbatch split (law 9), prefix reuse or activation checkpointing; compile and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullband.config import Recipe
from fullband.data.build import build_loader
from fullband.feedback.loss import IGNORE, token_losses
from fullband.feedback.schedule import PassSchedule
from fullband.files import read_tensors
from fullband.training import train
from fullband.training.metrics import read_metrics
from fullband.training.run import Run, prepare
from fullband.training.step import StepReport, accumulate_gradients
from reference.seam import read

MakeRecipe = Callable[..., Recipe]
UNEVEN = {"data__length": 24, "data__shuffle_documents": 4, "train__batch_rows": 6}


@pytest.fixture
def packed(recipe: MakeRecipe, jsonl: str) -> Callable[..., Recipe]:
    """Three passes over rows of packed text."""

    def make(output: str = "run", **overrides: Any) -> Recipe:
        text = {"data__source": {"kind": "files", "paths": [jsonl]}, "feedback__schedule": "three-pass"}
        return recipe(output, **(text | UNEVEN | overrides))

    return make


def gradients(recipe: Recipe, step: int = 1, z_loss: float = 1e-2, thin: bool = True) -> tuple[dict[str, Tensor], StepReport]:
    """Of one step in float64, on the first batch, from which `thin` takes ever more targets row by row."""
    run = prepare(recipe, resume=False)
    run.model.double()
    batch = run.loader.next_batch()
    if thin:
        for row in range(batch.shape[0]):
            batch.targets[row, : 3 * row] = IGNORE
    schedule = PassSchedule(recipe.feedback, 10, recipe.seed)
    report = accumulate_gradients(run.model, batch, step, schedule, recipe.train, z_loss)
    return {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}, report


def assert_same_gradients(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert one.keys() == other.keys() and len(one) > 20
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("prefix", ["off", "per-row"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_microbatch_split_does_not_matter(packed: MakeRecipe, prefix: str, rows: int) -> None:
    whole, report = gradients(packed(feedback__jitter=0.0, feedback__prefix=prefix))
    split, parts = gradients(packed(feedback__jitter=0.0, feedback__prefix=prefix, train__microbatch_rows=rows))
    assert_same_gradients(whole, split)
    assert report.objective == pytest.approx(parts.objective, abs=1e-12) and report.losses() == pytest.approx(parts.losses(), abs=1e-12)
    assert report.gradient_norm == pytest.approx(parts.gradient_norm, abs=1e-12)
    assert report.tokens == parts.tokens == 144 and report.token_equivalent == 432


def test_jitter_does_not_know_the_split_either(packed: MakeRecipe) -> None:
    whole, _ = gradients(packed(feedback__prefix="off", feedback__jitter=0.3))
    split, _ = gradients(packed(feedback__prefix="off", feedback__jitter=0.3, train__microbatch_rows=2))
    without, _ = gradients(packed(feedback__prefix="off", feedback__jitter=0.0))
    assert_same_gradients(whole, split)
    assert any(not torch.allclose(whole[name], without[name], atol=1e-4) for name in whole)


def test_microbatches_draw_prefixes_of_their_own(packed: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = PassSchedule(packed().feedback, 10, seed=3)
    rows = torch.arange(2)
    drawn = [schedule.prefixes(5, accumulation, 3, 24, rows) for accumulation in range(8)]
    assert len({tuple(p) for p in drawn}) > 4
    assert drawn == [schedule.prefixes(5, accumulation, 3, 24, rows) for accumulation in range(8)]
    asked = []
    real = PassSchedule.prefixes
    monkeypatch.setattr(PassSchedule, "prefixes", lambda self, *args: asked.append(args) or real(self, *args))
    gradients(packed(train__microbatch_rows=2), step=5)
    assert [(step, accumulation, passes, rows.tolist()) for step, accumulation, passes, _, rows, _ in asked] == [
        (5, 0, 3, [0, 1]),
        (5, 1, 3, [2, 3]),
        (5, 2, 3, [4, 5]),
    ]


def test_gradients_are_those_of_the_formula(packed: MakeRecipe) -> None:
    """Eq. 12 by hand: plain reading, one and two feedback passes over whole rows, sums over the scored targets, divided once."""
    found, report = gradients(packed(feedback__jitter=0.0, feedback__prefix="off", feedback__loss_weight=0.5), z_loss=0.01)
    run = prepare(packed(output="again"), resume=False)
    model = run.model.double()
    batch = run.loader.next_batch()
    for row in range(6):
        batch.targets[row, : 3 * row] = IGNORE
    objective = torch.zeros((), dtype=torch.float64)
    for passes, weight in ((0, 1.0), (1, 0.25), (2, 0.25)):
        states = read(model, batch.tokens, passes, batch.positions, batch.documents)
        nll, square = token_losses(states.flatten(0, 1), model.trunk.head_weight, batch.targets.flatten())
        objective = objective + weight * (nll + 0.01 * square).sum() / batch.counted
    objective.backward()
    assert float(objective.detach()) == pytest.approx(report.objective, abs=1e-12)
    assert_same_gradients({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, found)


@pytest.mark.parametrize("prefix", ["uniform", "per-row"])
def test_prefix_reuse_gives_the_naive_gradients(packed: MakeRecipe, prefix: str) -> None:
    options = {"feedback__prefix": prefix, "train__microbatch_rows": 3}
    reused, fewer = gradients(packed(**options))
    naive, all_of_them = gradients(packed(feedback__reuse=False, **options))
    assert_same_gradients(reused, naive)
    assert reused.keys() == naive.keys() and fewer.losses() == pytest.approx(all_of_them.losses(), abs=1e-10)
    assert fewer.executed_positions < all_of_them.executed_positions == 3 * 144


def test_prefix_reuse_gives_the_naive_training(packed: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six updates of the whole trainer in float64."""

    def double(recipe: Recipe, resume: bool, *rest: Any) -> Run:
        run = prepare(recipe.model_copy(update={"train": recipe.train.model_copy(update={"device": "cpu"})}), resume, *rest)
        run.model.double()
        run.optimizer = type(run.optimizer)(run.model, recipe.optim, recipe.train.steps)
        return run

    monkeypatch.setattr("fullband.training.loop.prepare", double)
    curves = []
    for reuse in (True, False):
        config = packed(f"reuse-{reuse}", feedback__reuse=reuse, train__microbatch_rows=3)
        train(config)
        curves.append([entry["objective"] for entry in read_metrics(Path(config.output or "") / "metrics.jsonl")])
    assert curves[0] == pytest.approx(curves[1], abs=1e-7) and curves[0][-1] < curves[0][0]


def test_activation_checkpointing_gives_the_same_gradients(packed: MakeRecipe) -> None:
    plain, _ = gradients(packed())
    checkpointed, _ = gradients(packed(train__activation_checkpointing=True))
    assert_same_gradients(plain, checkpointed)
    assert prepare(packed(train__activation_checkpointing=True), False).model.trunk.activation_checkpointing


def test_a_batch_without_targets_moves_nothing(packed: MakeRecipe) -> None:
    run = prepare(packed(), resume=False)
    batch = run.loader.next_batch()
    batch.targets.fill_(IGNORE)
    report = accumulate_gradients(run.model, batch, 1, run.schedule, run.recipe.train, 1e-3)
    assert report.objective == report.gradient_norm == 0.0


def test_bfloat16_trains_float32_weights(recipe: MakeRecipe) -> None:
    config = recipe(
        train__steps=30, train__dtype="bfloat16", train__batch_rows=8, optim__adam_lr=3e-2, data__source={"kind": "task", "group": "Z2"}
    )
    run = prepare(config, resume=False)
    batch = run.loader.next_batch()
    found = {}
    for dtype in ("bfloat16", "float32"):
        setting = config.train.model_copy(update={"dtype": dtype})
        run.optimizer.zero_grad()
        found[dtype] = accumulate_gradients(run.model, batch, 0, run.schedule, setting, 0.0).objective
        assert {p.grad.dtype for p in run.model.parameters() if p.grad is not None} == {torch.float32}
    assert found["bfloat16"] != found["float32"] and found["bfloat16"] == pytest.approx(found["float32"], rel=0.02)
    result = train(config)
    entries = read_metrics(result.folder / "metrics.jsonl")
    assert entries[-1]["loss_pass_1"] < entries[0]["loss_pass_1"] - 0.05
    assert {tensor.dtype for tensor in torch_tensors(result.checkpoint)} == {torch.float32}


def torch_tensors(checkpoint: Path) -> list[Tensor]:
    return [t for name in ("model.safetensors", "optimizer.safetensors") for t in read_tensors(checkpoint / name).values()]


def assert_compiled_is_the_same(packed: MakeRecipe, length: int, tolerance: float) -> int:
    """Eight steps with K = 2 and 3 over prefixes of many lengths, packed documents, and validation; returns the number of graphs."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    options = {
        "data__length": length,
        "feedback__schedule": [{"fraction": 1.0, "passes": {2: 0.5, 3: 0.5}}],
        "evaluation": {"every": 4, "rows": 4, "batch_rows": 2, "feedback_passes": [0, 1, "exact"]},
        "train": {"steps": 8, "batch_rows": 2, "log_every": 1, "device": "cpu"},
    }
    curves = []
    for compiled in (False, True):
        options["train"]["compile"] = compiled
        config = packed(f"compiled-{compiled}", **options)
        train(config)
        entries = read_metrics(Path(config.output or "") / "metrics.jsonl")
        curves.append([value for e in entries for value in (e["validation"].values() if "validation" in e else [e["objective"]])])
    assert curves[0] == pytest.approx(curves[1], rel=tolerance)
    assert not counters["graph_break"] and not counters["unimplemented"]
    return int(counters["stats"]["unique_graphs"])


def test_blocks_are_captured_whole_and_few_times(packed: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the code generator; `fullgraph` makes dynamo say so where it would silently give up (breaks, too many compilations)."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile_module(self, backend="eager", fullgraph=True, **how))
    trunk = {**packed().model.trunk, "context": 192}
    graphs = assert_compiled_is_the_same(lambda *a, **k: packed(*a, model__trunk=trunk, **k), 192, 1e-5)
    assert 4 <= graphs <= 2 * 4 * 2  # sliding and full layers; pass 1 and passes from 0, 64 and 128; with and without a cache


@pytest.mark.slow(minutes=1)
def test_compiled_blocks_train_the_same(packed: MakeRecipe) -> None:
    if not compiler_works():
        pytest.skip("torch.compile has no working compiler here")
    one_kind = {**packed().model.trunk, "layers": 1, "full_every": 1}  # a minute of compilation is enough
    assert_compiled_is_the_same(lambda *a, **k: packed(*a, model__trunk=one_kind, **k), 24, 2e-4)


@pytest.mark.parametrize(("length", "rounding"), [(2, 1), (24, 12), (128, 64), (512, 64), (2048, 256), (8192, 1024)])
def test_compiled_passes_start_at_few_places(recipe: MakeRecipe, length: int, rounding: int) -> None:
    assert recipe(data__length=length, train__compile=True).compiled_feedback.rounding == rounding
    assert recipe(data__length=length).compiled_feedback.rounding == 1
    for chosen in (1, 5):
        assert recipe(data__length=length, train__compile=True, feedback__prefix_rounding=chosen).compiled_feedback.rounding == chosen


def test_where_passes_start_changes_no_loss(packed: MakeRecipe) -> None:
    """With rounded starts a step computes more positions: the same prefixes, objective and gradients."""
    (free, few), (rounded, more) = (gradients(packed(feedback__prefix_rounding=rounding)) for rounding in (1, 8))
    assert_same_gradients(free, rounded)
    assert few.objective == pytest.approx(more.objective, abs=1e-12) and few.losses() == pytest.approx(more.losses(), abs=1e-12)
    assert few.executed_positions < more.executed_positions


def compiler_works() -> bool:
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
    except Exception:
        return False
    return True


def test_rows_beyond_the_context_and_a_small_vocabulary_are_refused(recipe: MakeRecipe) -> None:
    with pytest.raises(ValueError, match="must be at most the model's context of 64, got 65"):
        prepare(recipe(data__length=65), resume=False)
    small = {**recipe().model.trunk, "vocab_size": 5}
    with pytest.raises(ValueError, match=r"vocab_size: 5 is smaller than the tokenizer's 6"):
        prepare(recipe(model__trunk=small), resume=False)
    assert build_loader(recipe().data, 0, 1).vocab_size == 6
