"""The two recipes of the quickstart: the full-bandwidth one, and the standard one of equal token-equivalent compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullband.config import Recipe, TaskSource, load_recipe, parse
from fullband.feedback.schedule import PassSchedule
from fullband.presets import resolve_trunk

RECIPE = Path(__file__).with_name("recipe.yaml")
POSITIONS = (8, 16, 32, 64)  # where accuracy is reported, counted from 1
OWN_OPTIONS = {"seed": "its seed", "output": "its output folder", "name": "the names of its runs"}


def fullband_recipe(seed: int, output: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The shipped recipe with `a.b=c` overrides, for the run folder `output`/fullband.

    Raises ValueError, in one line, for a bad override and for a recipe that the quickstart can't compare: it needs a built-in task
    and a context of 64.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key in OWN_OPTIONS:
            raise ValueError(f"--set {override}: the quickstart sets {OWN_OPTIONS[key]} itself")
    recipe = load_recipe(RECIPE, list(overrides))
    recipe = parse(Recipe, recipe.model_dump() | {"seed": seed, "output": str(output / "fullband")}, "quickstart")
    if not isinstance(recipe.data.source, TaskSource):
        raise ValueError(f"data.source.kind: the quickstart compares models on a built-in task, not on {recipe.data.source.kind}")
    context = resolve_trunk(recipe.model, vocab_size=2).context
    if context < POSITIONS[-1]:
        raise ValueError(f"model.trunk.context: the quickstart evaluates {POSITIONS[-1]} positions, this model has only {context}")
    return recipe


def standard_recipe(fullband: Recipe, output: Path) -> Recipe:
    """`fullband` without feedback, with as many more steps as make the token-equivalent compute equal to within a step."""
    tokens_per_step = fullband.train.batch_rows * fullband.data.length
    schedule = PassSchedule(fullband.feedback, fullband.train.steps, fullband.seed)
    steps = round(schedule.token_equivalent_compute(tokens_per_step) / tokens_per_step)
    changes = {
        "name": f"{fullband.name.removesuffix('-fullband')}-standard",
        "description": "The same model without feedback, for the same token-equivalent compute",
        "output": str(output / "standard"),
        "feedback": fullband.feedback.model_copy(update={"schedule": "none", "adaptive": None, "fusion_warmup": 0}).model_dump(),
        "train": fullband.train.model_copy(update={"steps": steps}).model_dump(),
        "evaluation": fullband.evaluation.model_copy(update={"feedback_passes": [0]}).model_dump(),
    }
    return parse(Recipe, fullband.model_dump() | changes, "quickstart")


def reach(recipe: Recipe) -> int | None:
    """How many positions back the plain model's answer can depend on; None if a layer attends fully (then all of them)."""
    trunk = resolve_trunk(recipe.model, vocab_size=2)
    if any(trunk.layer_is_full(layer) for layer in range(trunk.layers)):
        return None
    return trunk.layers * (trunk.window - 1)
