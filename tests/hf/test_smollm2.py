"""A real pretrained model: SmolLM2-135M-Instruct, converted by the command line and compared with its source."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fullband.data.tokenizers import load_tokenizer
from fullband.decode import generate
from fullband.loading import load_model
from hf.sources import plain_model
from reference.seam import read

pytestmark = [pytest.mark.slow, pytest.mark.shared_data, pytest.mark.xdist_group("smollm2")]
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, there was a"]


@pytest.fixture(scope="module")
def source(smollm2: tuple[Path, Path]) -> Path:
    return smollm2[0]


@pytest.fixture(scope="module")
def converted(smollm2: tuple[Path, Path]) -> Any:
    return load_model(smollm2[1])


@pytest.fixture(scope="module")
def plain(source: Path) -> PreTrainedModel:
    return plain_model(source, dtype=torch.float32)


def perplexity(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).item())


@torch.no_grad()
def test_standard_perplexity_is_the_sources(source: Path, plain: PreTrainedModel, converted: Any) -> None:
    corpora = Path(os.environ.get("FULLBAND_SHARED") or Path(__file__).parents[3] / "shared") / "data" / "corpora"
    if not corpora.is_dir():
        pytest.skip(f"no corpora at {corpora}; set FULLBAND_SHARED")
    text = (corpora / "wikitext2_test.txt").read_text(encoding="utf-8")
    tokens = torch.tensor([load_tokenizer(source).encode(text[:20_000])[:1024]])
    expected = plain(tokens).logits
    found = converted.trunk.head(read(converted, tokens))
    assert torch.equal(found, expected)
    assert perplexity(found, tokens) == perplexity(expected, tokens)
    assert perplexity(expected, tokens) == pytest.approx(10.96, abs=0.05)  # it is the model, not noise


@torch.no_grad()
def test_greedy_text_is_the_sources(source: Path, plain: PreTrainedModel, converted: Any) -> None:
    tokenizer = load_tokenizer(source)
    for text in PROMPTS:
        prompt = tokenizer.encode(text)
        expected = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None)[0, len(prompt) :].tolist()
        for mode in ("standard", "soft"):  # the fusion starts at zero
            (found,) = generate(converted, [prompt], mode, max_new_tokens=24, stop_ids=())
            assert found.tokens == expected, (text, mode)
    assert " Paris" in tokenizer.decode(generate(converted, [tokenizer.encode(PROMPTS[0])], max_new_tokens=4, stop_ids=())[0].tokens)
