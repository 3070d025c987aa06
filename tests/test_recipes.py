"""Every shipped recipe loads, and its shape and schedule resolve."""

from pathlib import Path

import pytest
import torch

from fullband import costs
from fullband.config import load_recipe
from fullband.data.tasks import build_task
from fullband.model import FullBandModel
from fullband.optim import Optimizer
from fullband.presets import PAPER_RUNS, resolve_trunk

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(path for path in FOLDER.rglob("*.yaml") if path.parent.name != "experiments")  # those: tests/experiments


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert recipe.feedback.phases
    assert recipe.feedback.prefix != "answer" or recipe.data.source.kind == "chat"
    if recipe.model.source:  # the shape comes with the source
        assert recipe.model.rope is None or recipe.data.length <= recipe.model.rope.context
        return
    source = recipe.data.source
    vocab_size = build_task(source).vocab_size if source.kind == "task" else 100_277 if recipe.model.preset == "paper-1b" else None
    assert recipe.data.length <= resolve_trunk(recipe.model, vocab_size).context


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 4


def average_passes(path: Path) -> float:
    phases = load_recipe(path).feedback.phases
    return sum(phase.fraction * sum(k * p for k, p in phase.passes.items()) for phase in phases)


def test_the_text_baseline_has_equal_token_equivalent_compute() -> None:
    fullband, standard = (load_recipe(RECIPES[0].parent / name) for name in ("tiny-text.yaml", "tiny-text-standard.yaml"))
    assert fullband.train.steps * average_passes(RECIPES[0].parent / "tiny-text.yaml") == pytest.approx(standard.train.steps)
    assert fullband.train.batch_rows == standard.train.batch_rows and fullband.data == standard.data


@pytest.mark.parametrize(("name", "tokens"), PAPER_RUNS.items())
def test_paper_recipes_train_the_stated_tokens(name: str, tokens: float) -> None:
    recipe = load_recipe(RECIPES[0].parent / f"{name}.yaml")
    assert recipe.train.steps * recipe.train.batch_rows * recipe.data.length == pytest.approx(tokens, rel=1e-3)
    assert resolve_trunk(recipe.model, 100_277).vocab_size == 100_352


def test_the_plain_fine_tune_has_equal_token_equivalent_compute() -> None:
    fed, plain = (RECIPES[0].parent / name for name in ("convert-smollm2.yaml", "convert-smollm2-plain.yaml"))
    one, other = load_recipe(fed), load_recipe(plain)
    assert one.train.steps * average_passes(fed) == other.train.steps * average_passes(plain)
    assert one.train.batch_rows == other.train.batch_rows and one.data == other.data and one.model == other.model
    same = {"kind", "adam_lr", "adam_betas", "z_loss", "clip_norm"}
    assert one.optim.model_dump(include=same) == other.optim.model_dump(include=same)


@pytest.mark.parametrize(("name", "tokens"), [("long-context-paper", 12e9), ("sft-paper", 6e9)])
def test_the_later_stages_are_the_papers(name: str, tokens: float) -> None:
    """Section 4.2: 12B and 6B tokens, three passes throughout, 32K context, pretraining's batch."""
    recipe = load_recipe(RECIPES[0].parent / f"{name}.yaml")
    assert recipe.train.steps * recipe.train.batch_rows * recipe.data.length == pytest.approx(tokens, rel=1e-3)
    assert recipe.data.length == 32_768 and recipe.train.batch_rows * recipe.data.length == pytest.approx(300e3, rel=0.02)
    assert recipe.feedback.phases[0].passes == {3: 1.0}


@pytest.mark.parametrize(("name", "tokens"), [("100b", 100e9), ("200b", 200e9), ("400b", 400e9), ("1t", 1e12)])
def test_the_baselines_are_the_papers_runs_without_feedback(name: str, tokens: float) -> None:
    """Section 4: batches of 300K tokens, of 1.2M for the 1T-token run."""
    recipe, fed = (load_recipe(RECIPES[0].parent / f"{kind}.yaml") for kind in (f"standard-{name}", "paper-200b"))
    batch = recipe.train.batch_rows * recipe.data.length
    assert recipe.train.steps * batch == pytest.approx(tokens, rel=1e-3)
    assert batch == pytest.approx(1.2e6 if name == "1t" else 300e3, rel=0.02)
    assert not recipe.feedback.feeds_back and recipe.model == fed.model and recipe.data == fed.data and recipe.optim == fed.optim


@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem.startswith(("paper-", "standard-"))], ids=lambda p: p.stem)
def test_the_papers_models_are_built_without_memory(path: Path) -> None:
    """Model, parameter groups and optimizer state of every pretraining run, on the meta device: what is built is what is counted."""
    recipe = load_recipe(path)
    trunk = resolve_trunk(recipe.model, 100_277)
    with torch.device("meta"):
        model = FullBandModel(trunk, recipe.connection)
        optimizer = Optimizer(model, recipe.optim, recipe.train.steps)
    held = sum(tensor.numel() for name, tensor in optimizer.state_dict().items() if not name.endswith(".step"))
    assert held == costs.optimizer_elements(trunk, recipe.connection)
    assert sum(p.numel() for p in model.parameters()) == costs.count_parameters(trunk, recipe.connection).total
