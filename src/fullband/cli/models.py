"""Options that commands on a trained model share, and the model they open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fullband.config import FeedbackPasses
    from fullband.data.tokenizers import Tokenizer
    from fullband.model import FullBandModel

DTYPES = ("float32", "bfloat16", "float16", "float64")

ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, or a run folder (its newest checkpoint).")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps")]
Dtype = Annotated[str, typer.Option(help=", ".join(DTYPES))]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def open_model(folder: Path, device: str, dtype: str) -> tuple[FullBandModel, Tokenizer, Path]:
    """The model, its tokenizer, and the folder that held them. Raises ValueError for what is no model, device or dtype."""
    import torch

    from fullband.data.tokenizers import load_tokenizer
    from fullband.model import FullBandModel, resolve_model_folder
    from fullband.train.run import resolve_device

    if dtype not in DTYPES:
        raise ValueError(f"--dtype: '{dtype}' is none of {', '.join(DTYPES)}")
    place = resolve_device(device, "--device")
    folder = resolve_model_folder(folder)
    return FullBandModel.load(folder, place, getattr(torch, dtype)), load_tokenizer(folder), folder


def parse_feedback_passes(text: str) -> FeedbackPasses:
    """0, 1, 2, …, exact or converged. Raises ValueError."""
    word = text.strip()
    if word == "exact":
        return "exact"
    if word == "converged":
        return "converged"
    if word.isascii() and word.isdecimal():
        return int(word)
    raise ValueError(f"--feedback-passes: '{text}' is not 0, 1, 2, …, exact or converged")
