"""`fullband compare-runs`: a training run's page, or several runs side by side at equal compute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """Examples:

\b
  fullband compare-runs runs/tiny-text -o tiny-text.html
  fullband compare-runs runs/convert-smollm2 runs/convert-smollm2-plain -o convert.html
  fullband compare-runs runs/one runs/two --json
"""


def compare_runs(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs, finished or not.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write an HTML page that works offline to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Compare training runs side by side: shock, crossover and losses at equal token-equivalent compute."""
    from fullband.cli.console import messages, print_json
    from fullband.cli.console import output as stdout
    from fullband.files import write_bytes
    from fullband.plots.runs import compare, read_run

    runs = [read_run(folder) for folder in folders]
    found = compare(runs)
    print_json(found) if as_json else print_comparison(stdout(), found)
    if output:
        from fullband.plots.runs_page import page

        write_bytes(output, page(runs).encode())
        messages().print(f"page: {output}", soft_wrap=True)


def print_comparison(console: Console, found: dict[str, Any]) -> None:
    from fullband.amounts import short
    from fullband.cli.tables import print_table, table
    from fullband.plots.runs_page import losses

    made = table(
        ["run", "steps", "tokens", "token-equivalent", "computed", "shock", "crossover", "loss at equal compute", "at equal tokens"]
    )
    for run in found["runs"]:
        shock, on = run["switch_on_shock"], run["switch_on_step"]
        made.add_row(
            run["name"],
            f"{run['steps']:,}",
            short(run["tokens"]),
            short(run["token_equivalent_compute"]),
            short(run["executed_positions"]),
            "-" if shock is None else f"{shock:+.3f}",
            "-" if on is None else str(run["crossover_step"] or "not yet"),
            *(losses(e["losses"]) if (e := run[key]) else "-" for key in ("at_equal_compute", "at_equal_tokens")),
        )
    print_table(
        console,
        f"Runs at equal token-equivalent compute ({short(found['equal_compute'])}) and at equal tokens ({short(found['equal_tokens'])})",
        made,
        "Losses are held-out, in nats a token by feedback passes, from the last evaluation at or before that point.",
    )
    print_differing(console, found["differing_data"])


def print_differing(console: Console, differing: list[str]) -> None:
    if differing:
        console.print("These runs used different data: their losses are not comparable.", style="bold")
        for line in differing:
            console.print(f"  {line}", soft_wrap=True)
