"""`fullband quickstart`: train both models, evaluate both, say what came out."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from fullband.files import write_bytes
from fullband.quickstart.accuracy import read_models
from fullband.quickstart.recipes import POSITIONS, fullband_recipe, standard_recipe
from fullband.quickstart.result import result_of
from fullband.quickstart.table import print_result
from fullband.quickstart.training import train_all
from fullband.training.run import RECIPE

RUN_FOLDERS = ("standard", "fullband")
OUTPUTS = ("result.json", "report.html", "accuracy.png", "accuracy.svg", "curves.png")
WRITTEN_BY_TRAINING = {"recipe.yaml", "metrics.jsonl", "checkpoints", "tensorboard", "wandb"}


def quickstart(
    seed: int = 0,
    output: str | Path = Path("runs/quickstart"),
    overrides: Sequence[str] = (),
    rows: int = 1024,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train a standard and a full-bandwidth model at equal token-equivalent compute, evaluate both at up to four times the training length.

    Writes `output`/{standard, fullband} (the models), result.json, report.html and the pictures, and replaces those of an earlier
    quickstart. `overrides` change the shipped recipe ("data.source.group=A5"); `rows` held-out sequences are
    evaluated. Returns result.json.

    Raises ValueError, in one line, for a bad setting, a recipe that does not fit, and an output folder that holds anything else in a
    run's place or can't be written; RuntimeError if a training process breaks.
    """
    start = time.perf_counter()
    console = console or Console()
    output = Path(output)
    if rows < 1:
        raise ValueError(f"rows ({rows}): must be at least 1 held-out sequence")
    fullband = fullband_recipe(seed, output, overrides)
    standard = standard_recipe(fullband, output)
    clear(output)

    console.print(f"Training two models on [bold]{fullband.data.length}[/] positions, at equal token-equivalent compute (seed {seed})")
    trained = dict(zip(RUN_FOLDERS, train_all([standard, fullband], console), strict=True))
    console.print(f"Reading both at up to {POSITIONS[-1]} positions, on {rows} held-out rows")
    readings = read_models(output / "standard", output / "fullband", fullband, rows)
    seconds = time.perf_counter() - start
    result = result_of(fullband, standard, trained, readings, seconds, overrides)

    write_bytes(output / "result.json", (json.dumps(result, indent=2) + "\n").encode())
    write_pictures(output, result)
    print_result(console, result)
    page, numbers = (escape(str(output / name)) for name in ("report.html", "result.json"))  # a folder may have [ ] in its name
    console.print(f"\nReport: [bold]{page}[/] (open it in a browser)  Numbers: {numbers}", soft_wrap=True)
    console.print(next_step(output, fullband.data.source), soft_wrap=True, markup=False, highlight=False)
    return result


def next_step(output: Path, source: Any) -> str:
    """One line to try next."""
    group = "A5" if source.group != "A5" else "S3"
    place = output.with_name(f"{output.name}-{group.lower()}")
    return f"Try next: {shlex.join(['fullband', 'quickstart', '--set', f'data.source.group={group}', '--output', str(place)])}"


def write_pictures(output: Path, result: dict[str, Any]) -> None:
    """accuracy.png and .svg, curves.png and report.html, from result.json and the run folders."""
    from fullband.plots.accuracy import plot_accuracy
    from fullband.plots.curves import plot_curves, read_curves, read_steps
    from fullband.quickstart.report import report

    curves = {name: read_curves(output / name) for name in RUN_FOLDERS}
    steps = {name: read_steps(output / name) for name in RUN_FOLDERS}
    plot_accuracy(result, [output / "accuracy.png", output / "accuracy.svg"])
    plot_curves(curves, [output / "curves.png"], result["milestones"], steps)
    write_bytes(output / "report.html", report(result, curves, steps).encode())


def clear(output: Path) -> None:
    """Remove what an earlier quickstart left in `output`, and nothing else. Raises ValueError, before anything is removed."""
    for name in RUN_FOLDERS:
        check_ours(output / name, name)
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in OUTPUTS:
            (output / name).unlink(missing_ok=True)
        for name in RUN_FOLDERS:
            if (output / name).is_dir():
                shutil.rmtree(output / name)
    except OSError as error:
        raise ValueError(f"{output}: cannot write the output folder ({error.strerror})") from None


def check_ours(folder: Path, name: str) -> None:
    """Raises ValueError unless `folder` is absent, empty, or an earlier run of the quickstart's `name` model."""
    if not folder.exists() and not folder.is_symlink():
        return
    advice = "it would be replaced; move it, or choose another output folder"
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError(f"{folder}: not a folder of the quickstart's ({advice})")
    inside = {entry.name for entry in folder.iterdir()}
    foreign = sorted(inside - WRITTEN_BY_TRAINING)
    if foreign:
        raise ValueError(f"{folder}: holds {foreign[0]}, which the quickstart did not write ({advice})")
    if inside and _recipe_name(folder) != f"quickstart-{name}":
        raise ValueError(f"{folder}: holds another run than the quickstart's ({advice})")


def _recipe_name(folder: Path) -> Any:
    try:
        recipe = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return recipe.get("name") if isinstance(recipe, dict) else None
