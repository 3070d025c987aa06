"""`fullband generate` with one prompt: what its options do, against the library's own functions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.commands import Trained, fullband, refused
from fullband.data.tokenizers import load_tokenizer
from fullband.decode import generate_texts
from fullband.decode.quantize import quantize
from fullband.model import FullBandModel, resolve_model_folder

PROMPT = "the quick the quick"


def made_by_library(run: Trained, **settings: Any) -> list[str]:
    model, tokenizer = FullBandModel.load(run.folder), load_tokenizer(resolve_model_folder(run.folder))
    return [completion.text for completion in generate_texts(model, tokenizer, [PROMPT], **settings)]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--top-k", "3"], {"top_k": 3}),
        (["--top-p", "0.5", "--seed", "2"], {"top_p": 0.5, "seed": 2}),
        (["--min-p", "0.2", "--repetition-penalty", "1.3"], {"min_p": 0.2, "repetition_penalty": 1.3}),
        (["--stop", "k", "--stop", "e", "--n", "2"], {"stop": ["k", "e"], "n": 2}),
        (["--stop", "e", "--min-new-tokens", "7"], {"stop": ["e"], "min_new_tokens": 7}),
        (["--max-length", str(len(PROMPT) + 5)], {"max_length": len(PROMPT) + 5}),
    ],
)
def test_options_are_those_of_the_library(text_run: Trained, options: list[str], settings: dict[str, Any]) -> None:
    done = fullband("generate", text_run.folder, PROMPT, "--temperature", "0.9", "--max-new-tokens", "10", *options, "--json")
    texts = [completion["text"] for completion in done.json["completions"]]
    assert texts == made_by_library(text_run, temperature=0.9, max_new_tokens=10, **settings)


def test_samples_are_printed_one_after_the_other(text_run: Trained) -> None:
    done = fullband("generate", text_run.folder, PROMPT, "--temperature", "1", "--n", "3", "--max-new-tokens", "6")
    texts = made_by_library(text_run, temperature=1.0, n=3, max_new_tokens=6)
    assert done.out == "".join(f"--- sample {number} of 3\n{text}\n" for number, text in enumerate(texts, start=1))


def test_sliding_over_the_end_of_the_context(text_run: Trained) -> None:
    options = ["--overflow", "slide", "--max-new-tokens", "60", "--json"]
    (completion,) = fullband("generate", text_run.folder, "the " * 20, *options).json["completions"]
    assert len(completion["tokens"]) == 60 or completion["finish_reason"] == "stop"
    unlimited = fullband("generate", text_run.folder, PROMPT, "--overflow", "slide", "--json").json
    assert unlimited["settings"]["max_new_tokens"] == 256


def test_speculation_says_what_it_spared(text_run: Trained) -> None:
    plain = fullband("generate", text_run.folder, PROMPT, "--max-new-tokens", "20")
    done = fullband("generate", text_run.folder, PROMPT, "--max-new-tokens", "20", "--speculate")
    assert done.code == 0 and done.err.startswith("self-speculation: ") and len(done.err.splitlines()) == 1
    assert done.out == plain.out
    report = fullband("generate", text_run.folder, PROMPT, "--max-new-tokens", "20", "--speculate", "--json").json["speculation"]
    assert report["drafted"] >= report["kept"] and report["acceptance_length"] == report["kept"] / max(1, report["checks"])


def test_numbers_of_speculation(text_run: Trained) -> None:
    options = ["--speculate", "--draft-length", "2", "--draft-passes", "3", "--draft-tolerance", "0", "--max-new-tokens", "20", "--json"]
    done = fullband("generate", text_run.folder, PROMPT, *options).json
    assert done["settings"]["speculate"] == {"draft_length": 2, "max_passes": 3, "tolerance": 0}
    report = done["speculation"]
    assert 0 < report["drafted"] <= 2 * report["checks"] and report["passes"] <= 3 * report["checks"] + report["steps"]
    assert refused("generate", text_run.folder, PROMPT, "--draft-length", "2").endswith("--draft-tolerance need --speculate")
    assert "not Speculation(draft_length=0" in refused("generate", text_run.folder, PROMPT, "--speculate", "--draft-length", "0")


def test_compiled_steps_make_the_same_text(text_run: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler itself is in tests/decode; here the step is only handed to it."""
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda step, **_: compiled.append(step) or step)
    (tmp_path / "prompts.txt").write_text("the quick\nbrown\nfox the quick\n", encoding="utf-8")
    for prompts in ([PROMPT], [PROMPT, "--n", "3"], ["--prompts", tmp_path / "prompts.txt", "--batch-size", "2"]):
        options = [*prompts, "--temperature", "0.8", "--max-new-tokens", "12"]
        plain = fullband("generate", text_run.folder, *options)
        before = len(compiled)
        assert fullband("generate", text_run.folder, *options, "--compile").out == plain.out
        assert len(compiled) > before
    assert "leave out one of the two" in refused("generate", text_run.folder, PROMPT, "--compile", "--speculate")
    assert "leave out --compile" in refused("generate", text_run.folder, PROMPT, "--compile", "--compare")


def test_bfloat16(text_run: Trained) -> None:
    done = fullband("generate", text_run.folder, PROMPT, "--dtype", "bfloat16", "--max-new-tokens", "5", "--json").json
    assert done["settings"]["dtype"] == "bfloat16" and len(done["completions"][0]["tokens"]) <= 5


def test_int8_weights(text_run: Trained) -> None:
    pytest.importorskip("torchao")
    done = fullband("generate", text_run.folder, PROMPT, "--quantize", "int8", "--max-new-tokens", "8", "--json").json
    model, tokenizer = FullBandModel.load(text_run.folder), load_tokenizer(resolve_model_folder(text_run.folder))
    (expected,) = generate_texts(quantize(model), tokenizer, [PROMPT], max_new_tokens=8)
    assert done["completions"][0]["text"] == expected.text and done["settings"]["quantize"] == "int8"


def test_int8_weights_need_torchao(text_run: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unknown quantisation 'int3' (known: int8)" in refused("generate", text_run.folder, PROMPT, "--quantize", "int3")
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    assert "pip install 'fullband[quantize]'" in refused("generate", text_run.folder, PROMPT, "--quantize", "int8")


@pytest.mark.parametrize("overflow", ["refuse", "slide"])
def test_converged_reading_says_what_it_took(text_run: Trained, overflow: str) -> None:
    options = ["--mode", "fused", "--feedback-passes", "converged", "--max-new-tokens", "4", "--overflow", overflow]
    done = fullband("generate", text_run.folder, PROMPT, *options)
    assert done.err.startswith("converged prefill: ")
    result = fullband("generate", text_run.folder, PROMPT, *options, "--json").json
    assert result["feedback_passes"] == "converged" and result["converged"]["passes"] >= 1
    texts = made_by_library(text_run, mode="fused", feedback_passes="converged", max_new_tokens=4)
    assert [completion["text"] for completion in result["completions"]] == texts
