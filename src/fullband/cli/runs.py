"""`fullband runs`: how training runs stand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fullband.training.listing import Standing

EXAMPLES = """Examples:

\b
  fullband runs                          all below runs/
  fullband runs runs/tiny-text --json
  watch -n 10 fullband runs

\b
A run that is killed neither runs nor says that it ended; `fullband train FOLDER --resume` goes on from its last checkpoint. starts.jsonl in
its folder says when it was started, by what command, on what machine, with what versions, and how it ended.
"""


def runs(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Run folders, or folders of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """List training runs: state, loss, speed and time left."""
    from fullband.cli.console import print_json
    from fullband.training.listing import runs_in, standing

    found = [standing(folder) for folder in runs_in(folders or [Path("runs")])]
    if as_json:
        print_json({"runs": [asdict(run) | {"folder": str(run.folder)} for run in found]})
    else:
        print_runs(found)


def print_runs(found: list[Standing]) -> None:
    from fullband.amounts import duration, short
    from fullband.cli.console import output
    from fullband.cli.tables import print_table, table

    made = table(["run", "state", "steps", "loss by pass", "held-out, by passes", "tokens/s", "left"])
    for run in found:
        made.add_row(
            str(run.folder),
            run.state + (f": {run.note}" if run.note else ""),
            f"{run.steps:,}" + (f" of {run.of:,}" if run.of else ""),
            losses(run.losses),
            losses(run.validation),
            "-" if run.tokens_per_second is None else short(run.tokens_per_second),
            "-" if run.seconds_left is None else duration(run.seconds_left),
        )
    print_table(output(), "Training runs", made, "Losses in nats a token, as logged last.")


def losses(found: dict[str, float] | None) -> str:
    return "  ".join(f"{key}: {loss:.3f}" for key, loss in found.items()) if found else "-"
