"""A small recipe, and two small trained runs that the tests share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.commands import Trained, fullband, write_recipe
from drawing import undrawn


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def pictures_are_not_drawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """But where a test is marked `drawn`. Fixtures that tests share draw as users see it, unless they say otherwise."""
    if "drawn" in request.keywords:
        yield
    else:
        with undrawn():
            yield


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    def make(**overrides: Any) -> Path:
        return write_recipe(tmp_path, **overrides)

    return make


@pytest.fixture(scope="session")
def task_run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """20 steps on the S3 word problem. Shared: leave it as it is."""
    folder = tmp_path_factory.mktemp("task")
    path = write_recipe(folder)
    return Trained(path, folder / "run", fullband("train", path))


@pytest.fixture(scope="session")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """10 steps on bytes of a jsonl file. Shared: leave it as it is."""
    folder = tmp_path_factory.mktemp("text")
    texts = [f"document {i}: " + "the quick brown fox " * (i % 5) for i in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    source = {"kind": "files", "paths": [str(folder / "text.jsonl")], "validation_fraction": 0.3}
    path = write_recipe(folder, data={"source": source, "length": 24}, train__steps=10)
    return Trained(path, folder / "run", fullband("train", path, "--json"))


@pytest.fixture
def task_copy(task_run: Trained, tmp_path: Path) -> Trained:
    """The task run, to be changed."""
    shutil.copytree(task_run.folder, tmp_path / "run")
    return Trained(write_recipe(tmp_path), tmp_path / "run", task_run.done)
