"""`fullband plot`: the paper's figures from our own runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

\b
  fullband plot runs/tiny-text                                        learning curves and Fig. 4
  fullband plot results/diagnose/text results/probe -o figures        Figs. 1, 3 (or 10), 7a, 7b
"""


def plot(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, and output folders of `fullband diagnose` and `fullband probe`.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the figures.")] = Path("figures"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the names of the figures as JSON on stdout.")] = False,
) -> None:
    """Draw the paper's figures from runs, diagnoses and probes: PNG, SVG, and a page with values under the pointer.

    Run folders give learning curves by pass (shock and crossover marked) and Fig. 4's left panel; a diagnosis gives Fig. 1, and Fig. 3 or,
    from 1,000 passes on, Fig. 10; a probe gives Fig. 7.
    """
    from fullband.cli.compare_runs import print_differing
    from fullband.cli.console import output as stdout
    from fullband.cli.console import print_json
    from fullband.plots.gallery import write_gallery
    from fullband.plots.runs import differing_of
    from fullband.plots.sources import read_sources

    sources = read_sources(folders)
    names, differing = write_gallery(sources, output), differing_of(sources.runs)
    if as_json:
        print_json({"folder": str(output), "page": str(output / "index.html"), "figures": names, "differing_data": differing})
    else:
        print_differing(stdout(), differing)
        stdout().print(f"{output / 'index.html'}, and as PNG and SVG: {', '.join(names)}", soft_wrap=True)
