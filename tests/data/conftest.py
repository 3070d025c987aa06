"""Fixtures: the benchmark data beside the checkout, and small corpora of every kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.fixture
def shared_data() -> Path:
    """The folder of real corpora and tokenizers (FULLBAND_SHARED/data, or ../shared/data beside the repository)."""
    folder = Path(os.environ.get("FULLBAND_SHARED") or Path(__file__).parents[3] / "shared") / "data"
    if not folder.is_dir():
        pytest.skip(f"no benchmark data at {folder}; set FULLBAND_SHARED")
    return folder


@pytest.fixture
def corpus() -> list[str]:
    """60 documents of very different lengths (0 to 590 bytes), each saying which it is; some not ASCII."""
    return [f"<{i}>" + "añ→🙂"[i % 4] * (i * i % 590 // (1 + i % 4)) + f"</{i}>" for i in range(60)]


@pytest.fixture
def jsonl(tmp_path: Path, corpus: list[str]) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus), encoding="utf-8")
    return path
