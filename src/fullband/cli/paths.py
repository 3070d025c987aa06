"""Paths of the command line: ~ is the home folder also where the shell leaves it (--output=~/x, in quotes)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

PLACES = ("source", "target", "model", "baseline", "prompts")  # parameters that are a path or a name


def at_home(command: Callable[..., None]) -> Callable[..., None]:
    """The command, called with its paths expanded."""

    @wraps(command)
    def expanded(**given: Any) -> None:
        command(**{name: _expand(value, name in PLACES) for name, value in given.items()})

    return expanded


def _expand(value: Any, is_place: bool) -> Any:
    if isinstance(value, list):
        return [_expand(one, is_place) for one in value]
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    return os.path.expanduser(value) if is_place and isinstance(value, str) else value
