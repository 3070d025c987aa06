"""The two recipes: they load, they cost the same, and differ in nothing else."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from fullband.config import Recipe, load_recipe
from fullband.feedback.schedule import PassSchedule
from fullband.quickstart.recipes import RECIPE, fullband_recipe, reach, standard_recipe

OUTPUT = Path("runs/quickstart")


def compute(recipe: Recipe) -> int:
    schedule = PassSchedule(recipe.feedback, recipe.train.steps, recipe.seed)
    return schedule.token_equivalent_compute(recipe.train.batch_rows * recipe.data.length)


def test_the_shipped_recipe_loads_as_any_other() -> None:
    assert files("fullband.quickstart").joinpath("recipe.yaml").is_file()
    assert load_recipe(RECIPE).name == "quickstart-fullband"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("overrides", [[], ["train.steps=77", "train.batch_rows=3"], ["feedback.schedule=paper-200b"]])
def test_both_models_get_the_same_token_equivalent_compute(seed: int, overrides: list[str]) -> None:
    fullband = fullband_recipe(seed, OUTPUT, overrides)
    standard = standard_recipe(fullband, OUTPUT)
    assert abs(compute(standard) - compute(fullband)) <= fullband.train.batch_rows * fullband.data.length
    assert standard.train.steps > fullband.train.steps


def test_the_standard_model_differs_in_feedback_and_steps_alone() -> None:
    fullband = fullband_recipe(0, OUTPUT)
    standard = standard_recipe(fullband, OUTPUT)
    assert standard.feedback.schedule == "none"
    assert (standard.model, standard.data, standard.optim, standard.seed) == (fullband.model, fullband.data, fullband.optim, fullband.seed)
    assert standard.train.model_dump(exclude={"steps"}) == fullband.train.model_dump(exclude={"steps"})
    assert (standard.output, fullband.output) == (str(OUTPUT / "standard"), str(OUTPUT / "fullband"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.trunk.context=32", "evaluates 64 positions, this model has only 32"),
        ("data.source={kind: python-stdlib}", "built-in task"),
        ("seed=4", "sets its seed itself"),
        ("output=elsewhere", "sets its output folder itself"),
        ("train.stepz=4", "did you mean 'steps'"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        fullband_recipe(0, OUTPUT, [override])
    assert "\n" not in str(caught.value)


def test_reach_is_what_sliding_windows_let_through() -> None:
    shape = ["model.trunk.layers=3", "model.trunk.window=5"]
    assert reach(fullband_recipe(0, OUTPUT, [*shape, "model.trunk.full_every=6"])) == 12
    assert reach(fullband_recipe(0, OUTPUT, [*shape, "model.trunk.full_every=3"])) is None
