"""Answers with log-probabilities as sampled, and how far recomputed ones are from them: what a trainer needs of a server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from cli.commands import fullband, refused
from fullband.config import TrunkConfig
from fullband.data.tokenizers import ByteTokenizer
from fullband.decode import SampledAnswer
from fullband.evaluate.mismatch import Mismatch, mismatch_by_passes
from fullband.model import FullBandModel
from fullband.serve.client import Client, sampled_answers

PROMPTS = [list(b"ab"), list(b"once upon a time"), list(b"x")]
BOUND = 1e-5  # nats, of float32 over 20 tokens that are fed back; measured: 2e-6


@pytest.fixture(scope="session")
def served_model() -> FullBandModel:  # the one that `serving` serves
    """Float32, as models are served. Its maps keep lengths and feedback contracts, so that rounding does not grow from token to token; its
    logits are flat enough to sample many texts."""
    torch.manual_seed(5)
    shape = TrunkConfig(vocab_size=257, width=32, layers=2, heads=2, kv_heads=1, glu_width=64, context=96, window=16, full_every=2)
    model = FullBandModel(shape, "residual").eval()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)
    with torch.no_grad():
        model.connection.mergers[0].state.weight.mul_(0.4)
    return model


@pytest.mark.parametrize(("mode", "passes"), [("standard", None), ("soft", None), ("fused", 1), ("fused", "exact"), ("fused", "converged")])
def test_a_scorer_recomputes_what_was_sampled(served_model: FullBandModel, serving: Callable[..., str], mode: str, passes: Any) -> None:
    sampled = Client(serving(key="secret"), "secret").sample(PROMPTS, 20, mode, passes, n=2, seed=5)
    assert [answer.prompt for answer in sampled] == [prompt for prompt in PROMPTS for _ in range(2)]
    assert len({tuple(answer.tokens) for answer in sampled}) == 6 and all(len(answer.tokens) <= 20 for answer in sampled)
    exact, full, none = mismatch_by_passes(served_model, sampled, mode, passes, ["exact", 19, 0], batch_rows=4)
    assert exact.tokens == sum(len(answer.tokens) for answer in sampled) and exact.outside == full.outside == 0
    assert exact.largest < BOUND and full.largest < BOUND
    assert (none.largest < BOUND) if mode == "standard" else (none.largest > 0.1 and none.outside > 0.1)
    again = Client(serving(key="secret"), "secret").sample(PROMPTS, 20, mode, passes, n=2, seed=5)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in sampled], "a seed gives the same again"


def test_more_passes_come_closer(served_model: FullBandModel, serving: Callable[..., str]) -> None:
    sampled = Client(serving()).sample(PROMPTS, 20, seed=1)
    rows = mismatch_by_passes(served_model, sampled, answer_passes=[0, 1, 2, 4])
    assert [row.mean for row in rows] == sorted((row.mean for row in rows), reverse=True)


def test_what_a_mismatch_counts() -> None:
    answers = [SampledAnswer([1], [2, 3], [math.log(0.5), math.log(0.1)]), SampledAnswer([1], [4], [math.log(0.4)])]
    recomputed = [torch.tensor([0.5, 0.13], dtype=torch.float64).log(), torch.tensor([0.3], dtype=torch.float64).log()]
    found = Mismatch.of(2, recomputed, answers)
    deltas = [0, math.log(1.3), math.log(4 / 3)]
    assert (found.tokens, found.outside) == (3, pytest.approx(2 / 3)) and found.mean == pytest.approx(sum(deltas) / 3)
    assert found.largest == pytest.approx(math.log(4 / 3))
    for ratio, outside in ((0.81, 0), (0.79, 1), (1.19, 0), (1.21, 1)):
        assert Mismatch.of(0, [torch.tensor([ratio]).log()], [SampledAnswer([1], [2], [0.0])]).outside == outside
    with pytest.raises(ValueError, match="no answers"):
        Mismatch.of(0, [], [])


@pytest.fixture
def folder(served_model: FullBandModel, tmp_path: Path) -> Path:
    served_model.save(tmp_path / "m")
    ByteTokenizer().save(tmp_path / "m")
    (tmp_path / "prompts.txt").write_text("ab\nonce upon a time\n", encoding="utf-8")
    return tmp_path / "m"


def test_the_command_asks_a_server(folder: Path, serving: Callable[..., str]) -> None:
    prompts = folder.parent / "prompts.txt"
    asking = ["mismatch", folder, "--server", serving(), "--prompts", prompts, "--max-new-tokens", "12", "--n", "3", "--device", "cpu"]
    found = fullband(*asking, "--answer-passes", "0,exact", "--json").json
    assert found["answers"] == 6 and [row["answer_passes"] for row in found["rows"]] == [0, "exact"]
    assert found["rows"][1]["largest"] < BOUND < found["rows"][0]["largest"]
    table = fullband(*asking).out
    assert "6 answers" in table and "ratios outside [0.8, 1.2]" in table and "exact" in table


def test_the_command_takes_a_file_of_replies(folder: Path, serving: Callable[..., str], tmp_path: Path) -> None:
    asked = {"prompt": "ab", "max_tokens": 9, "n": 2, "logprobs": 0, "return_token_ids": True, "mode": "fused"}
    replies = [httpx.post(f"{serving()}/v1/completions", json=asked | {"seed": seed}, timeout=30).text for seed in (1, 2)]
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(replies) + "\n", encoding="utf-8")
    rows = fullband("mismatch", folder, "--answers", file, "--mode", "fused", "--answer-passes", "exact", "--json").json["rows"]
    assert rows[0]["largest"] < BOUND
    wrong = fullband("mismatch", folder, "--answers", file, "--mode", "standard", "--answer-passes", "exact", "--json").json["rows"]
    assert wrong[0]["largest"] > 0.1, "another mode than that of sampling shows"


def test_what_is_refused(folder: Path, serving: Callable[..., str], tmp_path: Path) -> None:
    prompts, file = folder.parent / "prompts.txt", tmp_path / "answers.jsonl"
    assert "give --server URL with --prompts FILE, or --answers FILE" in refused("mismatch", folder)
    assert "give --server" in refused("mismatch", folder, "--server", "http://127.0.0.1:1")
    assert "begins with http" in refused("mismatch", folder, "--server", "127.0.0.1:1", "--prompts", prompts)
    assert "no answer" in refused("mismatch", folder, "--server", "http://127.0.0.1:1", "--prompts", prompts)
    assert "401: a key is needed" in refused("mismatch", folder, "--server", serving(key="k"), "--prompts", prompts)
    assert "--answer-passes: must be" in refused("mismatch", folder, "--answers", file, "--answer-passes", "two")
    assert "cannot be read" in refused("mismatch", folder, "--answers", file)
    good = {"prompt_token_ids": [1], "token_ids": [2], "logprobs": {"token_logprobs": [-1.0]}}
    for content, why in (
        ("", "has no answers"),
        ("{", "answers.jsonl:1: not valid JSON"),
        ('{"choices": []}', "answers.jsonl:1: no reply"),
        (json.dumps({"choices": [{"text": "a"}]}), "return_token_ids"),
        (json.dumps({"choices": [good | {"token_ids": [2, 3]}]}), "has 2 token_ids and 1 token_logprobs"),
        (json.dumps({"choices": [good | {"token_ids": ["a"]}]}), "lists of ids"),
        (json.dumps({"choices": [good | {"logprobs": {"token_logprobs": [None]}}]}), "list of numbers"),
        (json.dumps({"choices": [good | {"token_ids": [999]}]}), "token id 999"),
    ):
        file.write_text(content, encoding="utf-8")
        assert why in refused("mismatch", folder, "--answers", file), content
    assert sampled_answers({"choices": [good]}) == [SampledAnswer([1], [2], [-1.0])]
