"""Where commands write: results to stdout, everything else to stderr, so that --json can be piped."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

PIPE_WIDTH = 140  # columns where the output is no terminal: tables are not folded


def output() -> Console:
    """stdout."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False)


def messages() -> Console:
    """stderr."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One JSON value on stdout. Infinite and undefined numbers, which JSON lacks, become null."""
    print(json.dumps(finite(value), indent=2, ensure_ascii=False))


def finite(value: Any) -> Any:
    """The value with None for infinite and undefined numbers, and strings for keys."""
    if isinstance(value, dict):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
