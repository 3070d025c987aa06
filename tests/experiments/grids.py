"""A grid that trains in seconds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from cli.commands import RECIPE

GRID: dict[str, Any] = {
    "name": "toy",
    "title": "A toy",
    "question": "Does it run?",
    "seeds": [0, 1, 2],
    "recipe": {key: value for key, value in RECIPE.items() if key not in ("name", "seed")}
    | {"train": RECIPE["train"] | {"log_every": 1}, "evaluation": {"every": 10, "rows": 4, "feedback_passes": [0]}},
    "cells": [
        {"name": "fed"},
        {"name": "plain", "set": {"feedback.schedule": "none"}, "equal": {"cell": "fed", "by": "token-equivalent"}},
    ],
    "measure": {"kind": "positions", "positions": [3, 12], "rows": 40, "feedback_passes": [0, 1, "exact"], "controls": ["zeroed"]},
    "comparisons": [{"cell": "fed", "reading": "exact", "to": "plain", "to_reading": "standard"}],
}


def write_grid(folder: Path, **changes: Any) -> Path:
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(copy.deepcopy(GRID) | changes, sort_keys=False), encoding="utf-8")
    return path
