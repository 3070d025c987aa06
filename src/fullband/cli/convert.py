"""`fullband convert`: attach latent feedback to a checkpoint that exists."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullband.cli.models import AsJson
from fullband.device import DTYPES, resolve_dtype

if TYPE_CHECKING:
    from fullband.hf.convert import Conversion

EXAMPLES = """Examples:

\b
  fullband convert HuggingFaceTB/SmolLM2-135M-Instruct -o smollm2-fullband
  fullband convert ./my-checkpoint -o my-fullband --fusion gated --calibrate notes.txt
  fullband convert runs/tiny-text -o tiny-text-hf          a model trained here, for AutoModelForCausalLM

\b
Then:
  fullband evaluate-loss smollm2-fullband --text notes.txt     0 feedback passes = the source, bit for bit
  fullband chat smollm2-fullband --mode soft
  fullband detach smollm2-fullband -o smollm2-again            the plain checkpoint, its weights unchanged
"""

Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to create; it appears only once it is complete.")]
Force = Annotated[bool, typer.Option("--force", help="Replace DIR if it is already a model folder.")]


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A Hugging Face checkpoint (folder or hub id), or a model or run folder of fullband.")
    ],
    output: Output,
    fusion: Annotated[
        str | None,
        typer.Option(
            help="Kind of fusion. residual (default): changes nothing until it is trained; gated (Eq. 4), concat, add: start at random."
        ),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Text file on which to measure the scale of embeddings, instead of over the vocabulary; may be repeated."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; default: as in the source.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Attach latent feedback to a checkpoint.

    The source stays unchanged inside: in standard mode the new model's logits equal it bit for bit, which is checked before anything is
    written. DIR holds weights, configs, tokenizer and a model card; transformers and every command of fullband can load it.
    """
    from fullband.cli.console import output as stdout
    from fullband.cli.console import print_json
    from fullband.cli.quiet import quiet_transformers

    wanted = None if dtype is None else resolve_dtype(dtype)
    check_fusion(fusion)
    quiet_transformers()
    from fullband.hf import convert as conversion

    made = conversion.convert(source, output, fusion, calibrate=calibrate or (), dtype=wanted, force=force)
    if as_json:
        print_json(made.to_json())
    else:
        stdout().print(described(made), soft_wrap=True)


def check_fusion(name: str | None) -> None:
    """Raises ValueError before a big model is loaded for nothing."""
    from fullband.feedback.mergers import MERGERS

    if name is not None and name not in MERGERS:
        raise ValueError(f"--fusion: must be one of {', '.join(MERGERS)}, got '{name}'")


def described(made: Conversion) -> str:
    from fullband.amounts import percent

    share = percent(made.fusion_parameters / made.parameters)
    kind = "an App. A model" if made.kind == "fullband" else f"'{made.kind}'"
    lines = [
        f"{made.output}: {kind} with the fusion '{made.fusion}', {made.parameters:,} parameters "
        f"({share} of them in the fusion), {made.dtype}",
        "standard mode equals the source, bit for bit (checked)",
    ]
    if not made.has_tokenizer:
        lines.append("it has no tokenizer that transformers can load")
    if not made.trained:
        untrained = "soft and fused equal standard" if made.fusion == "residual" else "soft and fused are worse than standard"
        lines.append(f"the fusion is not trained yet: until it is, {untrained}")
    return "\n".join(lines)
