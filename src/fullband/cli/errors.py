"""What a user did wrong is one line on stderr and exit code 2; FULLBAND_TRACEBACK=1 shows where it was found."""

from __future__ import annotations

import os
import re
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from fullband.cli.console import open_what_is_closed, spell_what_cannot_be_written, written_out

TRACEBACK = "FULLBAND_TRACEBACK"
OUT_OF_MEMORY = "out of memory"
LESS_MEMORY = {  # what each command can do about it
    "train": "lower train.microbatch_rows, or set train.activation_checkpointing=true",
    "experiment": "lower train.microbatch_rows",
    "convert": "--dtype bfloat16 halves the weights",
}
NO_MEMORY = re.compile(r"DefaultCPUAllocator: .*(memory|allocate)|not enough memory: you tried to allocate", re.DOTALL)
LESS_ELSEWHERE = "use a smaller model, fewer or shorter texts at a time, or --dtype bfloat16 where the command has it"


class OneLineErrors(TyperGroup):
    """A group of commands whose ValueErrors and OSErrors become `error: …`. Others are bugs and keep their traceback."""

    def main(self, *args: Any, **settings: Any) -> Any:
        open_what_is_closed()
        spell_what_cannot_be_written()  # before help and usage, too
        code: Any = 0
        try:
            return super().main(*args, **settings)
        except SystemExit as end:
            code = end.code
            raise
        finally:
            lost = written_out()
            if lost and not code:
                if not isinstance(lost, BrokenPipeError):  # nobody is there to tell
                    typer.echo(f"error: stdout: the result could not be written ({lost.strerror})", err=True)
                raise SystemExit(1 if isinstance(lost, BrokenPipeError) else 2)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of stdout has gone; there is nobody to tell
        except Exception as error:
            text = explain(error)
            if text == OUT_OF_MEMORY:
                text += f": {LESS_MEMORY.get(ctx.invoked_subcommand, LESS_ELSEWHERE)}"
            if text is None:
                raise
            if os.environ.get(TRACEBACK):
                traceback.print_exc()
            typer.echo(f"error: {text}", err=True)
            raise typer.Exit(2) from None


def explain(error: Exception) -> str | None:
    """The error in one line, or None if it is not the user's to mend."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or NO_MEMORY.search(str(error)):
        return OUT_OF_MEMORY
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (ValueError, OSError)):
        return " ".join(str(error).split())
    return None
