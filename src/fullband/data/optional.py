"""Packages that only some uses need: imported when used, and named with their pip extra when missing."""

from __future__ import annotations

import importlib
from typing import Any


def optional(module: str, purpose: str, extra: str = "data") -> Any:
    """Import `module`; ValueError that says what needs it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(f"{purpose} needs the package {package}: pip install 'fullband[{extra}]'") from None
