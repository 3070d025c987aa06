"""Options that commands on a trained model share, and the model they open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullband.device import DTYPES, resolve_device, resolve_dtype

if TYPE_CHECKING:
    from fullband.data.tokenizer import Tokenizer
    from fullband.loading import LoadedModel

ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, or a run folder (its newest checkpoint).")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help=", ".join(DTYPES))]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def open_model(folder: Path, device: str, dtype: str) -> tuple[LoadedModel, Tokenizer, Path]:
    """The model, its tokenizer, and the folder that held them. Raises ValueError for what is no model, device or dtype."""
    from fullband.cli.quiet import quiet_transformers
    from fullband.data.tokenizers import load_tokenizer
    from fullband.loading import load_model
    from fullband.model import is_converted, resolve_model_folder

    precision = resolve_dtype(dtype)
    place = resolve_device(device, "--device")
    folder = resolve_model_folder(folder)
    if is_converted(folder):
        quiet_transformers()
    return load_model(folder, place, precision), load_tokenizer(folder), folder
