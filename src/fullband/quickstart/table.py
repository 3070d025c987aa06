"""The quickstart's table in the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fullband.plots.style import series_label
from fullband.quickstart.recipes import POSITIONS


def print_result(console: Console, result: dict[str, Any]) -> None:
    """Accuracy by feedback passes and position with standard errors, then what it cost."""
    console.print(accuracy_table(result))
    console.print(compute_table(result))


def accuracy_table(result: dict[str, Any]) -> Table:
    length = result["task"]["length"]
    table = Table(
        title=f"Right answers at a position (trained on rows of {length})",
        caption=f"chance {result['chance']:.2f}; seed {result['seed']}; {result['rows']} held-out rows; ± standard error",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("evaluated with", no_wrap=True)
    for position in POSITIONS:
        table.add_column(str(position), justify="right")
    for name, accuracies in result["accuracy"].items():
        cells = [accuracy_cell(accuracies[key], result["stderr"][name][key], result["chance"]) for key in accuracies]
        table.add_row(series_label(name), *cells, end_section=name == "standard")
    return table


def accuracy_cell(accuracy: float, stderr: float, chance: float) -> str:
    text = f"{accuracy:.2f} ±{stderr:.3f}".replace("±0.", "±.")
    if accuracy >= 0.8:
        return f"[bold green]{text}[/]"
    return f"[dim]{text}[/]" if accuracy < chance + 3 * stderr + 0.02 else text


def compute_table(result: dict[str, Any]) -> Table:
    table = Table(title="What it took to train", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("model", no_wrap=True)
    for heading in ("steps", "tokens", "tokens × passes", "executed", "FLOPs", "seconds"):
        table.add_column(heading, justify="right")
    for name, run in result["training"].items():
        counts = [compact(run[key]) for key in ("tokens", "token_equivalent", "executed_positions")]
        table.add_row(series_label(name), f"{run['steps']:,}", *counts, f"{run['executed_flops']:.2e}", f"{run['seconds']:.0f}")
    return table


def compact(count: int) -> str:
    """1,234,567 as 1.235M."""
    return f"{count / 1e6:.3f}M" if count >= 1e6 else f"{count:,}"
