"""Models that recipes train get the verdict that they deserve. Minutes long: `pytest -m slow`.

FULLBAND_QUICKSTART names the folder of a quickstart that is done: its model is the word problem's, which then is not trained again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from fullband.config import Recipe, load_recipe, parse
from fullband.data.batch import Document
from fullband.data.build import build_loader
from fullband.diagnose import diagnose, judge, rows_of_documents, rows_of_task, trace_passes
from fullband.diagnose.diagnosis import DiagnosisSettings
from fullband.model import FullBandModel
from fullband.quickstart.recipes import fullband_recipe
from fullband.run_folder import newest_checkpoint
from fullband.training.loop import train
from reference.seam import read

ROOT = Path(__file__).parents[2]


def trained(recipe: Recipe, folder: Path) -> FullBandModel:
    train(parse(Recipe, recipe.model_dump() | {"output": str(folder)}, "test"))
    return FullBandModel.load(folder)


def of_the_quickstart(recipe: Recipe, folder: Path) -> FullBandModel:
    made = Path(os.environ.get("FULLBAND_QUICKSTART", folder)) / "fullband"
    if not made.is_dir():
        return trained(recipe, folder)
    assert load_recipe(made / "recipe.yaml").model_dump(exclude={"output"}) == recipe.model_dump(exclude={"output"})
    last = newest_checkpoint(made / "checkpoints")
    assert last is not None and last.name == f"step-{recipe.train.steps:08d}"
    return FullBandModel.load(made)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow(minutes=1.5)
def test_the_word_problem_is_wavefront_limited(tmp_path: Path) -> None:
    recipe = fullband_recipe(0, tmp_path)
    model = of_the_quickstart(recipe, tmp_path / "s3")
    found = diagnose(model, rows_of_task(recipe.data.source, 0, 8, 32, model.trunk.context, trained=16), DiagnosisSettings(rollout=200))  # type: ignore[arg-type]
    assert found.verdict.word == "wavefront-limited", found.verdict
    assert 0.05 < found.trace.arrival.passes_per_position < 0.9
    begun = time.process_time()
    long = trace_passes(model, rows_of_task(recipe.data.source, 0, 2, 1000, model.trunk.context), 1000)  # type: ignore[arg-type]
    assert time.process_time() - begun < 45 and long.fixed_at is not None and long.fixed_at <= model.trunk.context + 1
    assert judge(long).word == "wavefront-limited", judge(long)


@pytest.mark.slow(minutes=2)
def test_the_counting_model_oscillates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts rightly when it is read exactly, far beyond the lengths it was trained on, and flips in every pass past the wavefront."""
    monkeypatch.chdir(ROOT)
    recipe = load_recipe("recipes/diagnose/oscillating.yaml")
    model = trained(recipe, tmp_path / "oscillating")
    documents = build_loader(recipe.data, recipe.seed, 1).validation_documents(16)
    assert answers_right(model, documents) >= 0.9
    trace = trace_passes(model, rows_of_documents(documents, 8, 32, model.trunk.context), 32)
    found = judge(trace)
    assert found.word == "oscillating", found
    assert trace.returns.period == 2 and trace.returns.distance[1] < 0.1 and trace.shrinking < 0.8, trace.returns


def answers_right(model: FullBandModel, documents: list[Document]) -> float:
    """The share of documents at whose "=" exact reading prefers the right answer, e or o."""
    choices, right = torch.tensor(list(b"eo")), 0
    for document in documents:
        at = int((document.tokens == ord("=")).nonzero()[-1])
        with torch.no_grad():
            state_1D = read(model, document.tokens[None, : at + 1], "exact")[:, -1]
        best = choices[(state_1D @ model.trunk.head_weight[choices].T).argmax()]
        right += int(best == document.targets[at])
    return right / len(documents)


@pytest.mark.slow
def test_three_pass_text_contracts(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "diagnose" / "contracting.yaml")
    model = trained(recipe, tmp_path / "contracting")
    documents = build_loader(recipe.data, recipe.seed, 1).validation_documents(64)
    trace = trace_passes(model, rows_of_documents(documents, 8, 32, model.trunk.context), 32)
    assert judge(trace).word == "contracting", judge(trace)
    assert trace.ratio_median < 0.9 and trace.passes_needed[1e-2] is not None
