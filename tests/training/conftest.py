"""Tiny recipes and a small corpus; one thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fullband.config import Recipe

TRUNK = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "glu_width": 24, "context": 64, "window": 6, "full_every": 2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and a fork must not inherit a pool of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """A small recipe on the S3 word problem; `train__steps=5` sets train.steps, `output` is relative to the test's folder."""

    def make(output: str = "run", **overrides: Any) -> Recipe:
        raw: dict[str, Any] = {
            "name": "tiny",
            "seed": 3,
            "output": str(tmp_path / output),
            "model": {"trunk": TRUNK},
            "data": {"source": {"kind": "task"}, "length": 12},
            "feedback": {"schedule": [{"fraction": 1.0, "passes": {2: 1.0}}]},
            "optim": {"warmup_steps": 2},
            "train": {"steps": 6, "batch_rows": 4, "log_every": 1, "device": "cpu"},
            "evaluation": {"rows": 0},
        }
        for key, value in overrides.items():
            *sections, leaf = key.split("__")
            node = raw
            for section in sections:
                node = node[section]
            node[leaf] = value
        return Recipe.model_validate(raw)

    return make


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    """Documents of very different lengths, so that rows hold parts of several and scored positions are uneven."""
    path = tmp_path / "text.jsonl"
    texts = [f"document {i}: " + "the quick brown fox " * (i * i % 7) for i in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)
