"""`fullband info`: what a model, a recipe or a preset is made of and costs."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer

EXAMPLES = """Examples:

\b
  fullband info paper-1b                  the paper's model, and what its runs cost
  fullband info recipes/tiny-text.yaml    a recipe: schedule, compute, memory
  fullband info runs/tiny-text --json     a trained model
"""


def info(
    target: Annotated[str, typer.Argument(metavar="MODEL|RECIPE|PRESET", help="A model or run folder, a yaml recipe, or a preset.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Show what a model or a run costs.

    Parameters by part, FLOPs per token and pass, memory, and the compute of a schedule. Nothing is run.
    """
    from fullband import shipped
    from fullband.cli.console import output, print_json
    from fullband.presets import TRUNKS

    is_recipe = target not in TRUNKS and not Path(target).is_dir() and (shipped.is_recipe(target) or target.endswith((".yaml", ".yml")))
    if overrides and not is_recipe:
        raise ValueError(f"--set needs a recipe, got {target}")
    if target in TRUNKS:
        found = describe_preset(target)
    elif Path(target).is_dir():
        found = describe_folder(Path(target))
    elif is_recipe:
        found = describe_recipe(Path(target), overrides or [])
    else:
        nearest = difflib.get_close_matches(target, TRUNKS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{target}: no model folder, recipe or preset of this name; did you mean '{nearest}'? (presets: {', '.join(TRUNKS)})"
        )
    if as_json:
        print_json(found)
    else:
        print_found(output(), found)


def describe_preset(name: str) -> dict[str, Any]:
    from fullband.cli.describe import PAPER_TRUNK, describe_model, describe_paper_runs, describe_training_memory, preset_feedback
    from fullband.costs import PAPER
    from fullband.presets import TRUNKS

    trunk = TRUNKS[name]
    found = {"preset": name, "model": describe_model(trunk, PAPER, trunk.context)}
    found["training_memory"] = describe_training_memory(trunk, PAPER, 1, trunk.context, "bfloat16", [1, 2, 3], preset_feedback(name))
    return found | ({"paper_runs": describe_paper_runs(trunk)} if name == PAPER_TRUNK else {})


def describe_folder(folder: Path) -> dict[str, Any]:
    from fullband.cli.converted import describe_converted
    from fullband.cli.describe import describe_model
    from fullband.model import is_converted, read_config, resolve_model_folder

    folder = resolve_model_folder(folder)
    if is_converted(folder):
        return {"folder": str(folder), "converted": describe_converted(folder)}
    config = read_config(folder)
    return {"folder": str(folder), "model": describe_model(config.trunk, config.connection, config.trunk.context)}


def describe_recipe(path: Path, overrides: list[str]) -> dict[str, Any]:
    from fullband.cli.describe import describe_model, describe_run
    from fullband.config import load_recipe
    from fullband.training.resolve import shape_of

    recipe = load_recipe(path, overrides)
    trunk = shape_of(recipe)
    return {
        "recipe": str(path),
        "model": describe_model(trunk, recipe.connection, recipe.data.length),
        "run": describe_run(recipe, trunk, recipe.compiled_feedback),
    }


def print_found(console: Any, found: dict[str, Any]) -> None:
    from fullband.cli import tables
    from fullband.cli.converted import print_converted

    name = found.get("preset") or found.get("folder") or found["recipe"]
    if "converted" in found:
        print_converted(console, name, found["converted"])
        return
    tables.print_model(console, name, found["model"])
    if "training_memory" in found:
        tables.print_training_memory(console, found["training_memory"])
    if "run" in found:
        tables.print_run(console, found["run"])
    tables.print_decoding_memory(console, found["model"])
    if "paper_runs" in found:
        tables.print_paper_runs(console, found["paper_runs"])
