"""What every benchmark shares around its measurement: options, the line about the machine, the table and the JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def options(description: str, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options all benchmarks have; `description` is the module's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the numbers as JSON to FILE, or to the output")
    parser.add_argument("--rounds", type=int, default=rounds, help="interleaved repetitions; the minimum counts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads; 1 is steadiest on a busy machine (default %(default)s)")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="wall seconds, or this process's CPU seconds (use with --threads 1)"
    )
    return parser


def prepare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Set threads and seed; returns what a result must say about how it was made."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    return {"machine": machine(), "settings": settings}


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], result: dict[str, Any], to: str | None) -> None:
    """Print the table with the machine below it, and write `result` as JSON to the file `to` (or to the output, if it is "-")."""
    console = Console(stderr=to == "-")
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    about, settings = result["machine"], result["settings"]
    where = about["gpu"] or f"{about['processor']}, {about['cores']} cores"
    console.print(
        f"{where}, {about['threads']} threads, torch {about['torch']}; seed {settings['seed']}, "
        f"{settings['rounds']} rounds, {settings['clock']} clock"
    )
    text = json.dumps(_rounded(result), indent=2) + "\n"
    if to == "-":
        sys.stdout.write(text)
    elif to:
        path = Path(to)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _rounded(value: Any) -> Any:
    """Floats to four significant digits and more only where they carry them: a timing has no twelve."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
