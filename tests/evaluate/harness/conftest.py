"""A tiny Llama over bytes, as a Hugging Face folder and converted; benchmark data beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest


class Pair(NamedTuple):
    """A Hugging Face checkpoint and what `fullband convert` made of it."""

    source: Path
    converted: Path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = Path(os.environ.get("FULLBAND_SHARED", Path(__file__).parents[4] / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder}: the benchmark data are not beside this checkout; set FULLBAND_SHARED")
    return folder


@pytest.fixture(scope="session", autouse=True)
def offline() -> None:
    from fullband.evaluate.harness.tasks import offline as go_offline

    go_offline()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from fullband.hf.convert import convert
    from hf.sources import tiny_llama, write_source

    folder = tmp_path_factory.mktemp("llama")
    write_source(folder / "source", tiny_llama(max_position_embeddings=8192))
    convert(folder / "source", folder / "converted")
    return Pair(folder / "source", folder / "converted")
