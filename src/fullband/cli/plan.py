"""`fullband plan`: whether and how a recipe fits hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

\b
  fullband plan paper-200b --gpus 36 --gpu h200                     memory, communication, days
  fullband plan paper-200b --gpus 64 --gpu h100 --price-per-hour 2  and what it costs
  fullband plan standard-1t --scale                                 from 1 to 1,024 GPUs

Numbers are computed, not measured: FLOP/s are the data sheet's times --mfu.
"""


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A yaml recipe, a run folder, or a shipped recipe's name.")],
    gpus: Annotated[int, typer.Option("--gpus", help="Number of GPUs.")] = 8,
    gpu: Annotated[str, typer.Option("--gpu", help="h200, h100, a100, l40s or rtx4090.")] = "h200",
    mfu: Annotated[float, typer.Option("--mfu", help="Share of the data sheet's FLOP/s that computing reaches: an assumption.")] = 0.4,
    price: Annotated[float | None, typer.Option("--price-per-hour", help="Price of a GPU for an hour.")] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Sequences of a microbatch on one GPU; default: as in the recipe.")] = None,
    scale: Annotated[bool, typer.Option("--scale", help="A table from 1 to 1,024 GPUs instead.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Say whether and how a recipe fits hardware: memory, communication, time and cost.

    Exit code 2 if it does not fit, with what to change. `fullband info` says what a recipe is.
    """
    from fullband import planning
    from fullband.amounts import duration, percent, short, size
    from fullband.cli.console import output, print_json
    from fullband.cli.tables import print_table, table
    from fullband.config import load_recipe
    from fullband.training.resolve import shape_of

    loaded = load_recipe(recipe, overrides or [])
    trunk, console = shape_of(loaded), output()
    if scale:
        found = [planning.plan(loaded, trunk, 2**n, gpu, mfu, price, rows) for n in range(11)]
        if as_json:
            print_json(found)
            return
        made = table(["GPUs", "tokens/s", "MFU", "memory", "fits", "communication", "batch", "days"])
        for one in found:
            share = one["communication_seconds"] / (one["communication_seconds"] + one["compute_seconds"])
            tokens = short(one["tokens_per_second"] * one["step_seconds"])
            cells = [short(one["tokens_per_second"]), percent(one["mfu"]), size(one["needed"]["total"]), "yes" if one["fits"] else "no"]
            made.add_row(str(one["gpus"]), *cells, percent(share), tokens, f"{one['days']:.3g}")
        print_table(console, f"{loaded.name} on {gpu}, {percent(mfu)} of its FLOP/s assumed", made)
        return
    found_one = planning.plan(loaded, trunk, gpus, gpu, mfu, price, rows)
    if as_json:
        print_json(found_one)
    else:
        made = table(
            ["passes", "checkpointing", "prefix reuse", "weights", "gradients", "optimizer", "gathered", "activations", "logits", "total"],
            3,
        )
        for row in found_one["memory"]:
            parts = [
                size(row[part])
                for part in ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "total", "mean_prefix")
            ]
            made.add_row(str(row["passes"]), *("yes" if row[key] else "no" for key in ("checkpointing", "reuse")), *parts)
        print_table(console, f"Memory of a GPU, {found_one['rows_per_gpu']} sequence(s) on each, prefixes empty (the worst case)", made)
        made = table(["passes", "all-gather", "reduce-scatter", "NorMuon"])
        for k, sent in found_one["communication"].items():
            made.add_row(str(k), *(size(sent[part]) for part in ("all_gather", "reduce_scatter", "normuon")))
        print_table(console, "Communication of a step on a GPU, whole tensors", made)
        money = "" if found_one["cost"] is None else f", cost {found_one['cost']:,.0f}"
        console.print(
            f"{gpus} {gpu}: {found_one['step_seconds']:.3g} s a step (computing {found_one['compute_seconds']:.3g}, communication "
            f"{found_one['communication_seconds']:.3g}, overlapped), {short(found_one['tokens_per_second'])} tokens/s, "
            f"{duration(found_one['days'] * 86400)}{money}\n{found_one['source']}; {percent(mfu)} of its FLOP/s assumed"
        )
        if found_one["settings"]:
            console.print("as planned: " + " ".join(f"--set {setting}" for setting in found_one["settings"]))
    if not found_one["fits"]:
        needs = f"needs {size(found_one['needed']['total'])} of {size(found_one['room'])} on each GPU"
        raise ValueError(f"{loaded.name} does not fit {gpus} {gpu}: {needs}; what fits: {'; '.join(found_one['changes'])}")
