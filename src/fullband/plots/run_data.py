"""The data of training runs, from their folders: losses of runs that lie side by side mean little if it was not the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

RECIPE, CHECKPOINTS, TRAINING = "recipe.yaml", "checkpoints", "training.json"
ORDER = ("shuffle",)  # of a fingerprint: changes in which order documents come, not which


def data_of_run(folder: Path) -> dict[str, str]:
    """What decides a run's data, in words: as its newest checkpoint says, files by their contents, and as its recipe does, under "recipe".
    Empty where neither says it."""
    recipe = _mapping(folder / RECIPE)
    pointer = _mapping(folder / CHECKPOINTS / "last.json")
    identity = _mapping(folder / CHECKPOINTS / str(pointer.get("checkpoint", "")) / TRAINING).get("identity")
    found = identity.get("data") if isinstance(identity, dict) else None
    known = {key: str(value) for key, value in found.items() if key not in ORDER} if isinstance(found, dict) else {}
    if recipe.get("data"):
        known["recipe"] = json.dumps(recipe["data"], sort_keys=True, default=str)
    evaluation = recipe.get("evaluation")
    if isinstance(evaluation, dict) and "rows" in evaluation:
        known["held-out rows"] = str(evaluation["rows"])
    return known


def differing_data(runs: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What differs between the data of runs (by name), a line for each thing; runs of which nothing is known are left out of it."""
    known = {name: data for name, data in runs.items() if data}
    fingerprints = all(data.keys() - {"recipe", "held-out rows"} for data in known.values())
    keys = dict.fromkeys(key for data in known.values() for key in data)
    found = []
    for key in keys:
        if key != "held-out rows" and (key == "recipe") == fingerprints:
            continue  # a recipe may name the same files in other words: it counts only where a run has nothing better
        held = {name: data.get(key, "none") for name, data in known.items()}
        if len(set(held.values())) > 1:
            found.append(f"{key}: " + "; ".join(f"{value} ({name})" for name, value in held.items()))
    return found


def _mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}  # it only helps: what is compared are the run's own numbers
    return found if isinstance(found, dict) else {}
