"""Options that commands on a trained model share, and the model they open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

    from fullband.data.tokenizer import Tokenizer
    from fullband.feedback_config import FeedbackPasses
    from fullband.loading import LoadedModel

DTYPES = ("float32", "bfloat16", "float16", "float64")

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
    from fullband.training.run import resolve_device

    precision = parse_dtype(dtype)
    place = resolve_device(device, "--device")
    folder = resolve_model_folder(folder)
    if is_converted(folder):
        quiet_transformers()
    return load_model(folder, place, precision), load_tokenizer(folder), folder


def parse_dtype(name: str) -> torch.dtype:
    """Raises ValueError."""
    import torch

    if name not in DTYPES:
        raise ValueError(f"--dtype: must be one of {', '.join(DTYPES)}, got '{name}'")
    precision: torch.dtype = getattr(torch, name)
    return precision


def parse_feedback_passes(text: str, option: str = "--feedback-passes") -> FeedbackPasses:
    """0, 1, 2, …, exact or converged. Raises ValueError."""
    word = text.strip()
    if word == "exact":
        return "exact"
    if word == "converged":
        return "converged"
    if word.isascii() and word.isdecimal():
        return int(word)
    raise ValueError(f"{option}: must be 0, 1, 2, …, exact or converged, got '{text}'")
