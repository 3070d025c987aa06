"""`fullband compare`: evaluations side by side; the shards of one become one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullband.cli.models import AsJson

if TYPE_CHECKING:
    from rich.console import Console

    from fullband.evaluate.report.tables import ReportTable

EXAMPLES = """Examples:

\b
  fullband compare runs/evaluate/mine-paper-mc runs/evaluate/standard-paper-mc
  fullband compare runs/mbpp                       merges its shards once all are finished
  fullband compare runs/one runs/two --json
"""


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of `fullband evaluate`.")],
    as_json: AsJson = False,
) -> None:
    """Compare evaluations side by side.

    One folder: its reports are written again, from its shards if it has any, or from its results.json alone. Several: paired
    differences from the first, over the documents and problems that both contain.
    """
    from fullband.cli.console import output, print_json

    if len(runs) == 1:
        results = write_report(runs[0])
        print_json(results) if as_json else print_results(output(), results)
        return
    from fullband.evaluate.report.compare import compare_runs, comparison_table

    rows = compare_runs(runs)
    print_json({"rows": rows}) if as_json else print_report_table(output(), comparison_table(rows))


def write_report(folder: Path) -> dict[str, Any]:
    """results.json, the pictures, report.md and report.html. Returns the results."""
    from fullband.evaluate.report.markdown import markdown
    from fullband.evaluate.report.results import write_results
    from fullband.files import write_bytes
    from fullband.plots.evaluation_page import page, plot_evaluation

    results = write_results(folder)
    pictures = plot_evaluation(results, folder)
    write_bytes(folder / "report.md", markdown(results, pictures).encode())
    write_bytes(folder / "report.html", page(results, folder, pictures).encode())
    return results


def print_results(console: Console, results: dict[str, Any]) -> None:
    from fullband.evaluate.report.tables import tables_of

    for table in tables_of(results):
        print_report_table(console, table)


def print_report_table(console: Console, made: ReportTable) -> None:
    from fullband.cli.tables import print_table, table

    shown = table(made.columns, made.words)
    for row in made.rows:
        shown.add_row(*row)
    print_table(console, made.title, shown, "\n".join(made.notes))
