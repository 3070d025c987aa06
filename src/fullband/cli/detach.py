"""`fullband detach`: the plain checkpoint inside a converted model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullband.cli.convert import Force, Output
from fullband.cli.models import AsJson

EXAMPLES = """Example:

\b
  fullband detach smollm2-fullband -o smollm2-again
"""


def detach(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a converted model.")],
    output: Output,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Remove latent feedback from a converted model.

    The result is a plain Hugging Face checkpoint with its tokenizer. If only the fusion was trained, its weights are the source's, bit
    for bit.
    """
    from fullband.cli.console import output as stdout
    from fullband.cli.console import print_json
    from fullband.cli.quiet import quiet_transformers

    quiet_transformers()
    from fullband.hf.convert import detach_folder

    lm = detach_folder(folder, output, force)
    found = {
        "source": str(folder),
        "output": str(output),
        "kind": lm.config.model_type,
        "parameters": sum(parameter.numel() for parameter in lm.parameters()),
        "dtype": str(lm.dtype).removeprefix("torch."),
    }
    if as_json:
        print_json(found)
    else:
        stdout().print(f"{output}: a plain '{found['kind']}' model, {found['parameters']:,} parameters, {found['dtype']}", soft_wrap=True)
