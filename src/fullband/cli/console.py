"""Where commands write: results to stdout, everything else to stderr, so that --json can be piped. What a terminal has no character for
is written in other words, never an error: the result of hours must not be lost to a ±."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console

PIPE_WIDTH = 140  # columns where the output is no terminal: tables are not folded

SPELLED = {"±": "+-", "×": "x", "…": "...", "–": "-", "—": "-", "→": "->", "−": "-", "»": ">>", "«": "<<", "Σ": "sum", "≥": ">=", "≤": "<="}
SPELLED |= {"“": '"', "”": '"', "‘": "'", "’": "'", "\ufffd": "?", "·": "*", "√": "sqrt"}


def spell(error: UnicodeError) -> tuple[str | bytes, int]:
    """An error handler of codecs: a plain spelling of what cannot be written, else its number in the way of Python's strings."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = ""
    for character in error.object[error.start : error.end]:
        found += SPELLED.get(character) or character.encode("ascii", "backslashreplace").decode()
    return found, error.end


codecs.register_error("fullband.spell", spell)


def spell_what_cannot_be_written() -> None:
    """Of stdout and stderr, whatever their encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fullband.spell")


def open_what_is_closed() -> None:
    """stdin, stdout and stderr lead nowhere if the caller closed them (`>&-`): else the next file to be opened, a checkpoint perhaps, takes
    the number, and what is printed is written into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115 - open as long as the process


def written_out() -> OSError | None:
    """Write what stdout still holds; the error, if it can't be: the rest is then let go, so that the interpreter does not try again."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        return error
    return None


def is_unicode(stream: Any) -> bool:
    """Whether every character can be written to it."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").startswith(("utf", "cp65001"))


def json_text(value: Any, stream: Any, indent: int | None = None) -> str:
    """JSON that the stream can write: with escapes where it has not every character, so that nothing is lost."""
    return json.dumps(value, indent=indent, ensure_ascii=not is_unicode(stream))


def output() -> Console:
    """stdout."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False)


def messages() -> Console:
    """stderr."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One JSON value on stdout. Infinite and undefined numbers, which JSON lacks, become null."""
    from fullband.amounts import without_infinities

    print(json_text(without_infinities(value), sys.stdout, indent=2))
