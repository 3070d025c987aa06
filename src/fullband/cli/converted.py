"""What `info` says of a converted model: read from its config and from the headers of its weights, without loading them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from safetensors import SafetensorError, safe_open

from fullband.amounts import percent, size
from fullband.cli.tables import print_table, table
from fullband.model import read_json_config

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
NAMES = {"vocab_size": "vocabulary", "hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
NAMES |= {"num_key_value_heads": "key-value heads", "max_position_embeddings": "context", "sliding_window": "window"}


def describe_converted(folder: Path) -> dict[str, Any]:
    """Family, shape, parameters by part and bytes. Raises ValueError naming a file that is damaged or missing."""
    from fullband.feedback.connection import current_name
    from fullband.trunk.huggingface.rope import fixed_angles

    config = read_json_config(folder)
    trunk = config["trunk_config"]
    parts = {"embedding": 0, "trunk": 0, "fusion": 0}
    stored = 0
    for name, shape, dtype in stored_tensors(folder):
        numel = math.prod(shape)
        stored += numel * BYTES.get(dtype, 4)
        if not shape:
            continue  # a buffer, like the embedding scale
        part = "fusion" if current_name(name).startswith("connection.") else "embedding" if is_vocabulary(shape, trunk) else "trunk"
        parts[part] += numel
    total = sum(parts.values())
    named = {label: trunk[key] for key, label in NAMES.items() if trunk.get(key) is not None}
    fed_back = fixed_angles(SimpleNamespace(**trunk))
    return {
        "family": trunk.get("model_type"),
        "shape": named,
        "context_with_feedback": fed_back[0] if fed_back and fed_back[0] < named.get("context", 2**31 - 1) else named.get("context"),
        "fusion": (config.get("connection") or config).get("fusion"),
        "latent_feedback_mode": config.get("latent_feedback_mode"),
        "parameters": parts | {"total": total},
        "fusion_share": parts["fusion"] / total if total else 0.0,
        "bytes": stored,
    }


def is_vocabulary(shape: list[int], trunk: dict[str, Any]) -> bool:
    """Whether a matrix is an embedding or a head: one row a token."""
    return len(shape) == 2 and shape[0] == trunk.get("vocab_size")


def stored_tensors(folder: Path) -> list[tuple[str, list[int], str]]:
    """(name, shape, dtype) of every tensor, from all files of weights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no weights (*.safetensors) in this folder")
    found = []
    for path in files:
        try:
            with safe_open(path, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  not a dict
                    part = tensors.get_slice(name)
                    found.append((name, part.get_shape(), part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged or not a safetensors file ({error})") from None
    return found


def print_converted(console: Console, name: str, model: dict[str, Any]) -> None:
    shape = ", ".join(f"{label} {value:,}" for label, value in model["shape"].items())
    console.print(f"{name}: a converted '{model['family']}' model ({shape}), fusion {model['fusion']}\n", soft_wrap=True)
    if model["context_with_feedback"] != model["shape"].get("context"):
        note = f"With latent feedback the context is {model['context_with_feedback']:,}: in longer texts the rotary angles change.\n"
        console.print(note, soft_wrap=True)
    parameters = model["parameters"]
    made = table(["part", "parameters", "share"])
    for part, label in (("embedding", "embedding and head"), ("trunk", "rest of the trunk"), ("fusion", "fusion")):
        made.add_row(label, f"{parameters[part]:,}", percent(parameters[part] / parameters["total"]))
    made.add_section()
    made.add_row("total", f"{parameters['total']:,}", "")
    print_table(
        console, "Parameters", made, f"{size(model['bytes'])} of weights; `generate` uses {model['latent_feedback_mode']} by default."
    )
