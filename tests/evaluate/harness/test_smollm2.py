"""SmolLM2-135M, converted and in standard mode, against lm-eval's own Hugging Face model on the source. One document of each task behind
one example takes a minute or two on two cores; FULLBAND_PARITY_DOCUMENTS=50 takes fifty behind five (20 of GSM8K, 8 in batches): hours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness_parity import TASKS, compare, compare_batches

from fullband.evaluate.harness.model import FullBandLM
from fullband.evaluate.harness.tasks import load_benchmarks

pytestmark = [pytest.mark.slow, pytest.mark.shared_data, pytest.mark.xdist_group("smollm2")]
DOCUMENTS = int(os.environ.get("FULLBAND_PARITY_DOCUMENTS", "1"))
SHOTS = 5 if DOCUMENTS > 1 else 1


@pytest.fixture(scope="module")
def pair(smollm2: tuple[Path, Path]) -> tuple[FullBandLM, Any]:
    from lm_eval.models.huggingface import HFLM

    source, converted = smollm2
    return FullBandLM(converted, batch_size=1), HFLM(pretrained=str(source), dtype="float32", batch_size=1, device="cpu")


@pytest.mark.parametrize("task", TASKS)
def test_standard_is_lm_evals_own_model_in_batches_too(task: str, pair: tuple[FullBandLM, Any], shared_data: Path) -> None:
    ours, theirs = pair
    generates = task == "gsm8k"
    [benchmark] = load_benchmarks([task], None if generates else SHOTS, shared_data)
    found = [compare(ours, theirs, benchmark, min(DOCUMENTS, 20) if generates else DOCUMENTS)]
    if not generates:
        found.append(compare_batches(ours, benchmark, min(DOCUMENTS, 8)))
    for each in found:
        assert each["requests"] >= each["documents"] > 0
        assert each["largest_difference"] <= 1e-4 and each["greedy_differ"] == 0, each
