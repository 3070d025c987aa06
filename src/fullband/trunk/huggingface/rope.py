"""Rotary positions whose angles depend on how long the text is: how far a trunk can take them."""

from __future__ import annotations

from typing import Any


def fixed_angles(config: Any) -> tuple[int, str] | None:
    """(longest text in tokens, rope_type) within which every position keeps its angle, of the config of a text model; None = always.

    longrope goes over to other factors once any position of a batch reaches `original_max_position_embeddings`, dynamic NTK stretches with
    every position past `max_position_embeddings`. Keys that are cached keep the angles they were made with: past that length a text in
    pieces is no longer the whole text, and a row depends on its neighbours. yarn, llama3, linear and proportional angles are fixed.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = list(parameters.values()) if parameters and all(isinstance(part, dict) for part in parameters.values()) else [parameters]
    found = []
    for group in groups:
        kind, context = str(group.get("rope_type", "default")), int(getattr(config, "max_position_embeddings", None) or 0)
        if kind == "longrope" and _changes(group):
            found.append((int(group.get("original_max_position_embeddings") or context), kind))
        elif "dynamic" in kind:
            found.append((context - 1, kind))  # at the full length transformers keeps the angles of a longer text it has seen before
    return min(found, default=None)


def _changes(group: dict[str, Any]) -> bool:
    pairs = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
    return any(group.get(short) != group.get(long) for short, long in pairs)
