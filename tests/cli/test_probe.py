"""`fullband probe` on a small random model: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cli.commands import Trained, fullband, refused
from fullband.config import TrunkConfig
from fullband.data.tokenizers import ProgramTokenizer
from fullband.model import FullBandModel

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context is long enough for registers alone."""
    torch.manual_seed(0)
    tokenizer = ProgramTokenizer()
    shape = dict(width=16, layers=2, heads=2, kv_heads=1, glu_width=16, window=64, full_every=2)
    folder = tmp_path_factory.mktemp("model")
    FullBandModel(TrunkConfig(vocab_size=tokenizer.vocab_size, context=500, **shape)).save(folder)
    tokenizer.save(folder)
    return folder


def test_results_and_figures(model: Path, tmp_path: Path) -> None:
    done = fullband("probe", model, "--tasks", "registers", "--prefill", "standard,1", "--groups", 4, "--output", tmp_path, "--json")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "results.json").read_text()) == done.json
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "figure-7b.png", "figure-7b.svg"}
    assert (done.json["depths"], done.json["prefills"]) == (3, ["standard", "1"])
    settings = done.json["settings"]
    assert [(s["registers"], s["writes_each"]) for s in settings] == [(1, 16), (2, 8), (4, 4), (8, 2), (8, 4), (8, 8)]
    for setting in settings:
        assert setting["examples"] == 4 * 2 * setting["registers"]
        standard, recurrent = setting["prefills"]
        assert standard["depths"][0]["accuracy"] == standard["embedding_only"] == recurrent["embedding_only"] == 0.5
        assert standard["depths"][0]["moved"] in (0.0, None) and standard["depths"][2]["moved"] in (1.0, None)


def test_tables(model: Path) -> None:
    done = fullband("probe", model, "--tasks", "registers", "--prefill", "standard,4", "--groups", 4)
    assert done.code == 0, done.err
    for words in ("registers, latest write", "standard", "4 steps", "Is it used?", "Token counts are those of App. F"):
        assert words in done.out, words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "sums"], "unknown probe task 'sums'"),
        (["--output", f"{__file__}/report"], "can't be written"),
        (["--prefill", "3"], "unknown prefill '3' (known: standard, 1, 2, 4, full)"),
        (["--tasks", "memory", "--groups", "4"], "memory: 1324 tokens do not fit the model's context of 500; leave this task out"),
    ],
)
def test_refusals(model: Path, arguments: list[str], words: str) -> None:
    assert words in refused("probe", model, *arguments)


def test_a_model_of_a_task_has_no_words_for_the_texts(task_run: Trained) -> None:
    assert "the tokenizer task:group-word S3 has no words for App. F's texts" in refused("probe", task_run.folder)


def test_a_seed_too_large_names_the_option(model: Path) -> None:
    done = fullband("probe", model, "--seed", str(2**32))
    assert done.code == 2 and "--seed" in done.err and "4294967295" in done.err
