"""`fullband train`: train a recipe, resume it, or say what it would do."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fullband.config import Recipe
    from fullband.training import RunResult

EXAMPLES = """Examples:

\b
  fullband train tiny-text
  fullband train recipes/tiny-text.yaml --set train.steps=200 --set output=runs/trial --dry-run
  fullband train runs/tiny-text --resume              after Ctrl-C, SIGTERM or a kill
  torchrun --nproc-per-node 8 -m fullband train tiny-text
"""


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A yaml recipe, the name of an included one, or a run folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, as in train.steps=100; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the recipe's folder from its last checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print parameter groups, schedule and cost; write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; progress stays on stderr.")] = False,
) -> None:
    """Train a model from a recipe.

    Ctrl-C and SIGTERM save the run and stop; a second Ctrl-C stops at once.
    """
    from fullband.cli.console import messages, output, print_json
    from fullband.config import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    if dry_run:
        plan = plan_of(loaded)
        print_json(plan) if as_json else print_plan(output(), loaded.name, plan)
        return

    from fullband.training import train as run
    from fullband.training.progress import TrainingProgress

    with TrainingProgress(messages()) as progress:
        result = run(loaded, resume, progress)
    if result.main:
        print_json(summary(result)) if as_json else print_summary(output(), result)
    if result.signal and result.main:
        again = shlex.join(["fullband", "train", str(recipe), *(word for o in overrides or [] for word in ("--set", o)), "--resume"])
        messages().print(
            f"stopped by {signal.Signals(result.signal).name} after step {result.steps}; saved in {result.checkpoint}\n"
            f"continue with: {again}",
            soft_wrap=True,
        )
    if result.signal:
        raise typer.Exit(128 + result.signal)


def plan_of(recipe: Recipe) -> dict[str, Any]:
    """What training `recipe` would do. Raises ValueError for all that `train` would refuse, but for what the run folder holds."""
    from fullband.cli.describe import describe_converted, describe_model, describe_run
    from fullband.model import FullBandModel
    from fullband.optim.groups import describe_groups, parameter_groups
    from fullband.training.resolve import resolve

    made = resolve(recipe, dry=True)
    optim, model = recipe.optim, made.model
    if isinstance(model, FullBandModel):
        trunk, described = model.config.trunk, describe_model(model.config.trunk, model.config.connection, recipe.data.length)
    else:
        trunk, described = None, describe_converted(model, recipe)
    return {
        "device": str(made.device),
        "data": made.loader.fingerprint(),
        "notices": made.notices,
        "groups": describe_groups(parameter_groups(model, optim.kind), optim),
        "model": described,
        "run": describe_run(recipe, trunk, made.feedback),
    }


def print_plan(console: Any, name: str, plan: dict[str, Any]) -> None:
    from fullband.cli import tables

    if "shape" in plan["model"]:
        tables.print_model(console, name, plan["model"])
    else:
        found = plan["model"]
        console.print(
            f"{name}: {found['type']} from {found['source']} with the {found['fusion']} fusion, {found['parameters']['total']:,} "
            f"parameters ({found['parameters']['fusion']:,} in the fusion), context {found['context']:,}\n",
            soft_wrap=True,
        )
    console.print(f"Parameter groups\n\n{plan['groups']}\n")
    tables.print_run(console, plan["run"])
    for notice in plan["notices"]:
        console.print(f"note: {notice}", soft_wrap=True)
    console.print(
        f"data: {', '.join(plan['data'].values())}\nrun folder: {plan['run']['folder']}, device: {plan['device']}; nothing was written"
    )


def summary(result: RunResult) -> dict[str, Any]:
    milestones = result.milestones
    return {
        "folder": str(result.folder),
        "checkpoint": str(result.checkpoint),
        "steps": result.steps,
        "complete": result.signal is None,
        "tokens": result.tokens,
        "token_equivalent_compute": result.token_equivalent,
        "executed_positions": result.executed_positions,
        "validation": result.validation,
        "switch_on_step": milestones.switch_on_step,
        "switch_on_shock": milestones.shock,
        "crossover_step": milestones.crossover_step,
        "seconds": result.seconds,
    }


def print_summary(console: Any, result: RunResult) -> None:
    from fullband.amounts import duration, short

    milestones = result.milestones
    console.print(
        f"{result.steps} steps, {short(result.tokens)} tokens, token-equivalent compute {short(result.token_equivalent)} "
        f"({short(result.executed_positions)} positions computed), {duration(result.seconds)}"
    )
    if result.validation:
        console.print("validation loss by feedback passes: " + ", ".join(f"{k}: {loss:.4f}" for k, loss in result.validation.items()))
    if milestones.shock is not None:
        crossover = "not yet" if milestones.crossover_step is None else f"step {milestones.crossover_step}"
        console.print(
            f"feedback since step {milestones.switch_on_step}: switch-on shock {milestones.shock:+.3f} nats, crossover: {crossover}"
        )
    if result.signal is None:
        console.print(f"model: {result.checkpoint}\ntry: {shlex.join(['fullband', 'evaluate-loss', str(result.folder)])}", soft_wrap=True)
