"""SmolLM2-135M, converted and in standard mode, against lm-eval's own Hugging Face model on the source. One document of each task takes
minutes on two cores; FULLBAND_PARITY_DOCUMENTS=50 reads fifty (20 of GSM8K, 8 in batches), which takes hours there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness_parity import TASKS, compare
from benchmarks.smollm2 import package_folder, write_source

from fullband.evaluate.harness.choice import score_benchmark
from fullband.evaluate.harness.model import FullBandLM
from fullband.evaluate.harness.tasks import load_benchmarks
from fullband.hf.convert import convert

pytestmark = [pytest.mark.slow, pytest.mark.shared_data]
DOCUMENTS = int(os.environ.get("FULLBAND_PARITY_DOCUMENTS", "1"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source, converted); FULLBAND_SMOLLM2 names a source that `python -m benchmarks.smollm2` has made already."""
    folder = tmp_path_factory.mktemp("smollm2")
    source = Path(os.environ.get("FULLBAND_SMOLLM2") or folder / "source")
    if not source.is_dir():
        try:
            package_folder()
        except ValueError as missing:
            pytest.skip(str(missing))
        write_source(source)
    convert(source, folder / "converted")
    return source, folder / "converted"


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> tuple[FullBandLM, Any]:
    from lm_eval.models.huggingface import HFLM

    source, converted = folders
    return FullBandLM(converted, batch_size=1), HFLM(pretrained=str(source), dtype="float32", batch_size=1, device="cpu")


@pytest.mark.parametrize("task", TASKS)
def test_standard_is_lm_evals_own_model(task: str, pair: tuple[FullBandLM, Any], shared_data: Path) -> None:
    ours, theirs = pair
    generates = task == "gsm8k"
    [benchmark] = load_benchmarks([task], None if generates else 5, shared_data)
    found = compare(ours, theirs, benchmark, min(DOCUMENTS, 20) if generates else DOCUMENTS)
    assert found["requests"] >= found["documents"] > 0
    assert found["largest_difference"] <= 1e-4 and found["greedy_differ"] == 0, found


@pytest.mark.parametrize("task", TASKS[:-1])
def test_batches_of_1_and_8_agree(task: str, folders: tuple[Path, Path], shared_data: Path) -> None:
    [benchmark] = load_benchmarks([task], 5, shared_data)
    found = []
    for batch_rows in (1, 8):
        lm = FullBandLM(folders[1], batch_size=batch_rows)
        score_benchmark(lm, benchmark, [0], min(DOCUMENTS, 8))
        found.append({key: scores["0"] for key, scores in lm.journal.items()})
    one, eight = found
    assert one.keys() == eight.keys()
    for key in one:
        assert one[key][0] == pytest.approx(eight[key][0], abs=1e-4) and one[key][1] == eight[key][1]
