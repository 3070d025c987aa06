"""What the playground shows of states: a given text by feedback passes, and what the carried state changes of an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

from fullband.config import TaskSource, TrunkConfig
from fullband.data.tasks import build_task, group_table
from fullband.data.tokenizers import ByteTokenizer, TaskTokenizer
from fullband.decode import answer_logprobs
from fullband.feedback.by_passes import top_states
from fullband.model import FullBandModel
from fullband.serve.scheduler import Scheduler
from fullband.serve.views import CarriedRequest, ViewRequest, about_task, by_passes, carried
from reference.decoding import ReferenceRows
from reference.seam import embed


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


def test_whoever_goes_away_or_waits_too_long_gives_up_its_view(
    serving: Callable[..., str], scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, end = list[str](), threading.Event()

    def slow(model: Any, tokenizer: Any, asked: ViewRequest) -> dict[str, Any]:
        begun.append(asked.text)
        assert asked.text != "first" or end.wait(30)
        return {}

    def ask(text: str, seconds: float = 30) -> httpx.Response:
        return httpx.post(f"{address}/fullband/passes", json={"text": text}, timeout=seconds)

    monkeypatch.setattr("fullband.serve.app.by_passes", slow)
    monkeypatch.setattr(scheduler, "most_waiting", 1)
    address = serving(seconds=2)
    first = threading.Thread(target=ask, args=("first",))
    first.start()
    try:
        while not begun:
            time.sleep(0.01)
        with pytest.raises(httpx.ReadTimeout):
            ask("gone", 0.5)
        late: list[httpx.Response] = []
        waits = threading.Thread(target=lambda: late.append(ask("late")))
        waits.start()
        time.sleep(0.5)
        full = ask("too many")
        assert full.status_code == 429 and full.headers["Retry-After"] and "1 views are waiting" in full.json()["error"]["message"]
        waits.join(20)
        assert late[0].status_code == 504
    finally:
        end.set()
        first.join(20)
    assert ask("last").status_code == 200 and begun == ["first", "last"]


PROMPT, ANSWER = list(b"once upon"), [*list(b" a time, long"), 256]
MODES = [("soft", None), ("fused", 1), ("fused", 3), ("fused", "exact")]


@torch.no_grad()
def slow_carried(model: FullBandModel, prompt: list[int], answer: list[int], passes: int | str) -> tuple[list[float], list[float]]:
    """The slow twin: whole rows are run anew for every token, once with the last input merged and once as it is."""
    rows, with_state, without = ReferenceRows(model, [prompt], passes), [], []
    history = list(prompt)
    for token in answer:
        tops, merged = rows.tops(), rows.inputs
        rows.inputs = [torch.cat([merged[0][:-1], embed(model.trunk, torch.tensor([history]))[0][-1:]])]
        plain, rows.inputs = rows.tops(), merged
        for top, found in ((tops, with_state), (plain, without)):
            found.append(float(model.trunk.head(top)[0].log_softmax(-1)[token]))
        rows.append_tokens([token], tops)
        history.append(token)
    return with_state, without


@pytest.mark.parametrize(("mode", "passes"), MODES)
def test_what_the_carried_state_changes(served_model: FullBandModel, mode: str, passes: int | str | None) -> None:
    asked = CarriedRequest(answer=ANSWER, mode=mode, feedback_passes=passes)
    found = carried(served_model, ByteTokenizer(), PROMPT, ANSWER, asked)
    with_state, without = slow_carried(served_model, PROMPT, ANSWER, passes or 0)
    assert found["with"] == pytest.approx(with_state, abs=1e-5) and found["without"] == pytest.approx(without, abs=1e-5)
    assert (found["with"][0] == found["without"][0]) == (mode == "soft")
    assert all(abs(a - b) > 1e-3 for a, b in zip(found["with"][1:], found["without"][1:], strict=True))
    assert found["prompt_positions"] == len(PROMPT) * {None: 1, 1: 2, 3: 4, "exact": 1}[passes]
    assert found["tokens"] == [*" a time, long", "token_id:256"]


def test_of_a_converged_prompt_too_and_of_a_single_token(served_model: FullBandModel) -> None:
    asked = CarriedRequest(answer=ANSWER, mode="fused", feedback_passes="converged")
    found = carried(served_model, ByteTokenizer(), PROMPT, ANSWER, asked)
    expected = answer_logprobs(served_model, [PROMPT], [ANSWER], "fused", "converged")["exact"][0].tolist()
    assert found["with"] == pytest.approx(expected, abs=1e-5)
    assert found["with"][0] != found["without"][0] and found["prompt_positions"] >= 2 * len(PROMPT) - 1
    one = carried(served_model, ByteTokenizer(), PROMPT[:1], ANSWER[:1], CarriedRequest(answer=ANSWER[:1], mode="fused", feedback_passes=2))
    assert one["with"] == one["without"], "the first position of a text carries nothing"


def test_carried_over_http(serving: Callable[..., str]) -> None:
    address = serving()

    def ask(**body: object) -> httpx.Response:
        return httpx.post(f"{address}/fullband/carried", json=body, timeout=30)

    by_text = ask(prompt="once upon", answer=" a time", mode="fused", feedback_passes=2).json()
    assert by_text == ask(prompt=PROMPT, answer=list(b" a time"), mode="fused", feedback_passes=2).json() and len(by_text["with"]) == 7
    refused = {
        "standard carries no state": {"prompt": "a", "answer": "b", "mode": "standard"},
        "1 to 1024 tokens": {"prompt": "a", "answer": ""},
        "context of 96": {"prompt": "a" * 50, "answer": "b" * 50},
        "outside 0..256": {"prompt": "a", "answer": [257]},
        "is empty": {"prompt": "", "answer": "a"},
        "no chat template": {"messages": [{"role": "user", "content": "a"}], "answer": "b"},
    }
    for why, body in refused.items():
        answer = ask(**body)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text


def test_what_the_page_asks_first(serving: Callable[..., str]) -> None:
    about = httpx.get(f"{serving(mode='fused')}/fullband/about", timeout=30).json()
    same = {"engine": "fullband", "model": "tiny", "chat": False, "mode": "fused", "states": True, "task": None}
    assert about == same | {"max_model_len": 96}
    assert httpx.get(f"{serving(key='secret')}/fullband/about", timeout=30).status_code == 401


def test_what_the_page_is_told_of_a_task() -> None:
    told = {
        group: about_task(TaskTokenizer(task.name, task.names))
        for group in ("S3", "A4", "Z5")
        if (task := build_task(TaskSource(group=group)))
    }
    assert told["Z5"] == {"name": "group-word Z5", "tokens": list("01234"), "permutations": None}
    for group in ("S3", "A4"):
        elements = told[group]["permutations"]
        for a, row in enumerate(group_table(group)):  # as the game's pictures compose them: first a, then b
            for b, product in enumerate(row):
                assert [elements[b][place] for place in elements[a]] == list(elements[product])
    assert about_task(ByteTokenizer()) is None
