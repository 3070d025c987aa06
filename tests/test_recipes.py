"""Every shipped recipe loads, and its shape and schedule resolve."""

from pathlib import Path

import pytest

from fullband.config import load_recipe
from fullband.presets import PAPER_RUNS, resolve_schedule, resolve_trunk

RECIPES = sorted((Path(__file__).parent.parent / "recipes").rglob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    trunk = resolve_trunk(recipe.model, 100_277 if recipe.model.preset == "paper-1b" else None)
    assert recipe.data.length <= trunk.context
    assert resolve_schedule(recipe.feedback.schedule)


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 4


def average_passes(path: Path) -> float:
    phases = resolve_schedule(load_recipe(path).feedback.schedule)
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
