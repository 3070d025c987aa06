"""`fullband quickstart`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

\b
  fullband quickstart
  fullband quickstart --seed 1 --output runs/quickstart-1
  fullband quickstart --set data.source.group=A5
"""


def quickstart(
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the models and their data.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the models, the report and result.json.")] = Path("runs/quickstart"),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json on stdout, everything else on stderr.")] = False,
) -> None:
    """See what latent feedback does.

    Trains a standard and a full-bandwidth model on a word problem at equal compute, and evaluates both at up to four times
    the training length: two to three minutes on two cores.
    """
    from rich.console import Console

    from fullband.cli.console import print_json
    from fullband.quickstart import quickstart as run

    result = run(seed, output, overrides or [], console=Console(stderr=as_json))
    if as_json:
        print_json(result)
