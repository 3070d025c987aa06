"""A given text by feedback passes, as the playground shows it."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
import torch

from fullband.config import TaskSource, TrunkConfig
from fullband.data.tasks import build_task
from fullband.data.tokenizers import ByteTokenizer, TaskTokenizer
from fullband.feedback.by_passes import top_states
from fullband.model import FullBandModel
from fullband.serve.views import ViewRequest, by_passes


@torch.no_grad()
def test_losses_are_those_of_the_model(served_model: FullBandModel) -> None:
    found = by_passes(served_model, ByteTokenizer(), ViewRequest(text="hello there", feedback_passes=2))
    assert [row["feedback_passes"] for row in found["rows"]] == [0, 1, 2, "exact"] and found["tokens"] == list("hello there")
    tokens = torch.tensor([list(b"hello there")])
    for row in found["rows"]:
        logits = served_model(tokens, row["feedback_passes"]).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        assert row["loss"][0] is None and row["loss"][1:] == pytest.approx(expected.tolist(), abs=1e-5)
    one, two = (top_states(served_model, tokens, passes) for passes in (0, 1))
    change = ((two - one).norm(dim=-1) / two.norm(dim=-1))[0].tolist()
    assert found["rows"][0]["change"] is None and found["rows"][1]["change"] == pytest.approx(change, abs=1e-6) and change[0] == 0


@pytest.mark.parametrize("source", [TaskSource(), TaskSource(task="modular", modulus=5), TaskSource(group="Z3")])
def test_answers_of_a_task_and_the_right_ones(source: TaskSource) -> None:
    task = build_task(source)
    torch.manual_seed(0)
    shape = TrunkConfig(vocab_size=task.vocab_size, width=16, layers=1, heads=2, kv_heads=1, glu_width=16, context=32, window=8)
    examples = task.examples(0, "validation", 0, 1, 9)
    tokenizer = TaskTokenizer(task.name, task.names)
    found = by_passes(FullBandModel(shape).eval(), tokenizer, ViewRequest(text=tokenizer.decode(examples.tokens[0].tolist())))
    assert found["right"] == [task.names[answer] for answer in examples.targets[0].tolist()]
    assert all(len(row["answers"]) == 9 and "loss" not in row for row in found["rows"]) and len(found["rows"]) == 10


def test_what_cannot_be_shown(serving: Callable[..., str]) -> None:
    address = serving()
    refused = {"at least one token": {"text": ""}, "context of 96": {"text": "a" * 200}, "64": {"text": "a", "feedback_passes": 99}}
    for why, body in refused.items():
        answer = httpx.post(f"{address}/fullband/passes", json=body, timeout=30)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"]
    assert len(httpx.post(f"{address}/fullband/passes", json={"text": "abc"}, timeout=30).json()["rows"]) == 10
    assert httpx.post(f"{serving(playground=False)}/fullband/passes", json={"text": "abc"}, timeout=30).status_code == 404
