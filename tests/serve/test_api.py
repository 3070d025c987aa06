"""The API over a real socket, with OpenAI's own client, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from fullband.data.chat_template import ChatTemplate
from fullband.data.tokenizers import ByteTokenizer
from fullband.decode import answer_logprobs, generate_texts
from fullband.decode.options import GenerateOptions
from fullband.model import FullBandModel
from fullband.serve.scheduler import Scheduler

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def alone(model: FullBandModel, prompt: str, mode: str = "soft", passes: Any = None, **options: Any) -> str:
    return generate_texts(model, ByteTokenizer(), [prompt], mode, passes, **options)[0].text


def client(address: str, key: str = "none", max_retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=max_retries)


def post(address: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(address + path, json=body, timeout=30)


@pytest.mark.parametrize(("mode", "passes"), [("standard", None), ("soft", None), ("fused", 1), ("fused", "exact"), (None, 2)])
def test_completions_of_openais_client(served_model: FullBandModel, serving: Callable[..., str], mode: str | None, passes: Any) -> None:
    api = client(serving())
    ours = {name: value for name, value in {"mode": mode, "feedback_passes": passes}.items() if value is not None}
    asked: dict[str, Any] = {"model": "tiny", "prompt": "once upon", "max_tokens": 20, "temperature": 0, "extra_body": ours}
    expected = alone(served_model, "once upon", mode or "fused", passes, max_new_tokens=20)
    whole = api.completions.create(**asked)
    assert whole.choices[0].text == expected and whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9, 20)
    chunks = list(api.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected and len(chunks) > 5
    assert chunks[-1].usage and chunks[-1].usage.total_tokens == 29


def test_several_prompts_samples_and_ids(served_model: FullBandModel, serving: Callable[..., str]) -> None:
    api = client(serving())
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 0.9, "seed": 4, "n": 2}
    found = api.completions.create(prompt=["ab", "cd"], **asked)  # type: ignore[call-overload]
    expected = [
        one.text
        for p in ("ab", "cd")
        for one in generate_texts(served_model, ByteTokenizer(), [p], max_new_tokens=8, temperature=0.9, seed=4, n=2)
    ]
    assert [choice.text for choice in found.choices] == expected and [choice.index for choice in found.choices] == [0, 1, 2, 3]
    ids = api.completions.create(prompt=[[97, 98], [99, 100]], **asked)  # type: ignore[call-overload]
    assert [choice.text for choice in ids.choices] == expected
    stop = alone(served_model, "ab", max_new_tokens=20)[3]
    stopped = api.completions.create(model="tiny", prompt="ab", max_tokens=20, temperature=0, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == alone(served_model, "ab", max_new_tokens=20, stop=stop)


def test_echo_with_log_probabilities_scores_a_text(served_model: FullBandModel, serving: Callable[..., str]) -> None:
    """What lm-eval's local-completions asks for."""
    api = client(serving())
    found = api.completions.create(
        model="tiny", prompt="hello", max_tokens=0, echo=True, logprobs=1, temperature=0, extra_body={"mode": "standard"}
    )
    choice = found.choices[0]
    assert choice.text == "hello" and choice.logprobs and choice.logprobs.tokens == list("hello")
    assert choice.logprobs.token_logprobs and choice.logprobs.token_logprobs[0] is None
    import torch

    with torch.no_grad():
        plain = served_model(torch.tensor([list(b"hello")]), 0).logits[0].log_softmax(-1)
    expected = [float(plain[place, token]) for place, token in enumerate(b"ello")]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-9)
    assert found.usage and found.usage.completion_tokens == 0


def test_token_ids_come_with_the_stop_id_and_its_log_probability(served_model: FullBandModel, serving: Callable[..., str]) -> None:
    """What a trainer needs of an answer: all that was sampled."""
    address = serving(template=TEMPLATE)
    asked = {"prompt": "ab", "max_tokens": 40, "temperature": 4.0, "seed": 8, "n": 4, "logprobs": 0, "return_token_ids": True}
    whole = post(address, **asked).json()
    ended = [choice for choice in whole["choices"] if choice["finish_reason"] == "stop"]
    assert ended and all(choice["token_ids"][-1] == 256 and 256 not in choice["token_ids"][:-1] for choice in ended)
    for choice in whole["choices"]:
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        (expected,) = answer_logprobs(served_model, [list(b"ab")], [ids])["exact"]
        assert choice["prompt_token_ids"] == list(b"ab") and logprobs == pytest.approx(expected.tolist(), abs=1e-8)
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    with httpx.stream("POST", f"{address}/v1/completions", json={**asked, "n": 1, "stream": True}, timeout=30) as stream:
        chunks = [json.loads(line[6:])["choices"][0] for line in stream.iter_lines() if line.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [chunk["prompt_token_ids"] for chunk in chunks if chunk["prompt_token_ids"]] == [list(b"ab")]
    echoed = post(address, **{**asked, "echo": True}).json()["choices"][0]
    assert echoed["token_ids"] == whole["choices"][0]["token_ids"]
    messages = [{"role": "user", "content": "hi"}]
    chat = post(address, "/v1/chat/completions", messages=messages, max_tokens=3, logprobs=True, return_token_ids=True).json()
    assert chat["prompt_token_ids"] == list(b"user:hi\na:") and len(chat["choices"][0]["token_ids"]) == 3
    without = post(address, **{**asked, "return_token_ids": False}).json()["choices"]
    assert all("token_ids" not in choice and "token_id:256" not in choice["logprobs"]["tokens"] for choice in without)


@pytest.mark.parametrize(("mode", "passes"), [("standard", 0), ("fused", 2), ("fused", "exact")])
def test_lm_evals_local_completions_scores_as_we_do(
    served_model: FullBandModel, serving: Callable[..., str], mode: str, passes: Any
) -> None:
    """Log-likelihoods and whether an answer is the greedy one, as lm-eval reads them from any server."""
    pytest.importorskip("tenacity")
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    import torch

    class Asking(completions.LocalCompletionsAPI):  # type: ignore[misc,name-defined]
        def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return super()._create_payload(*args, **kwargs) | {"mode": mode} | ({"feedback_passes": passes} if passes else {})

    asking = Asking(base_url=f"{serving()}/v1/completions", model="tiny", tokenizer_backend=None, batch_size=4)
    asking.tokenizer, asking.tokenized_requests = object(), True  # the requests are ids already
    draw = random.Random(2)
    pairs = [([draw.randrange(257) for _ in range(draw.randrange(1, 20))], [draw.randrange(257) for _ in range(3)]) for _ in range(6)]
    with torch.no_grad():
        context = pairs[0][0]
        best = context.copy()
        for _ in range(2):
            best.append(int(served_model(torch.tensor([best]), passes).logits[0, -1].argmax()))
        pairs.append((context, best[len(context) :]))
        found = asking._loglikelihood_tokens([(("", ""), *pair) for pair in pairs])
        for (before, answer), (loglikelihood, is_greedy) in zip(pairs, found, strict=True):
            logits = served_model(torch.tensor([before + answer]), passes).logits[0, len(before) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum()
            assert loglikelihood == pytest.approx(float(expected), abs=1e-8)
            assert is_greedy == (logits.argmax(-1).tolist() == answer)
    assert [is_greedy for _, is_greedy in found][-1]


def test_chat_of_openais_client(served_model: FullBandModel, serving: Callable[..., str]) -> None:
    api = client(serving(template=TEMPLATE))
    messages: Any = [{"role": "user", "content": "hi"}]
    expected = alone(served_model, "user:hi\na:", max_new_tokens=12)
    whole = api.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == expected
    content = whole.choices[0].logprobs
    assert content and content.content and len(content.content) == 12 and len(content.content[0].top_logprobs) == 2
    stream = api.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (HI | {"top_logprobs": 2}, "top_logprobs: needs logprobs: true"),
        (HI | {"max_tokens": 2, "max_completion_tokens": 3}, "two names of one limit"),
        (HI | {"tools": [{"type": "function"}]}, "tools is not supported"),
        (HI | {"tool_choice": "required"}, "tool_choice is not supported"),
        (HI | {"response_format": {"type": "json_object"}}, "response_format is not supported"),
        (HI | {"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        (HI | {"reasoning_effort": "high"}, "reasoning_effort is not supported"),
        (HI | {"n": 5}, "n must be at most 4, got 5"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages.0.role: must be 'system', 'developer', 'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content: required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "content must be text"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "exceeds the model's context of 96"),
    ],
)
def test_chat_requests_that_are_refused(serving: Callable[..., str], body: dict[str, Any], why: str) -> None:
    answer = post(serving(template=TEMPLATE), "/v1/chat/completions", **body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and why in message and "\n" not in message


def test_what_changes_no_answer_is_taken(served_model: FullBandModel, serving: Callable[..., str]) -> None:
    """Fields that clients send by habit, nulls, and messages as an earlier answer gave them."""
    address = serving(template=TEMPLATE)
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}], "name": None},
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": "yo",
            "refusal": None,
            "annotations": [],
            "tool_calls": None,
            "function_call": None,
            "audio": None,
        },
        {"role": "user", "content": "well?"},
    ]
    idle = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True, "prediction": None}
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "modalities": ["text"],
        "audio": None,
    }
    nulls = dict.fromkeys(
        ("n", "stop", "seed", "top_p", "stream", "logprobs", "top_logprobs", "stream_options", "presence_penalty", "mode")
    )
    bounds = {"max_tokens": 8, "max_completion_tokens": 8, "temperature": 0}
    asked = {"messages": messages, **bounds, **idle, **nothing, **nulls}
    expected = alone(served_model, "system:be brief\nuser:hi\nassistant:yo\nuser:well?\na:", max_new_tokens=8)
    assert post(address, "/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"] == expected
    assert post(address, prompt="a", max_tokens=2, best_of=1, suffix="", seed=-1, logit_bias=None, echo=None).status_code == 200


def test_a_chats_stream_has_log_probabilities(serving: Callable[..., str]) -> None:
    api = client(serving(template=TEMPLATE))
    asked: dict[str, Any] = {"model": "tiny", **HI, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = api.chat.completions.create(**asked).choices[0].logprobs
    stream = api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    parts = [chunk.choices[0].logprobs for chunk in stream if chunk.choices]
    assert whole and whole.content and [info for part in parts if part for info in part.content or []] == whole.content


def test_a_model_without_template_refuses_chat(serving: Callable[..., str]) -> None:
    answer = post(serving(), "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**30}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "a", "n": 0}, 400, "n"),
        ({"prompt": "a", "mode": "fusedd"}, 400, "mode"),
        ({"prompt": "a", "mode": "soft", "feedback_passes": 2}, 400, "feedback_passes"),
        ({"prompt": "a", "feedback_passes": -3}, 400, "feedback_passes"),
        ({"prompt": "a", "logit_bias": {"1": 2}}, 400, "logit_bias is not supported"),
        ({"prompt": "a", "temprature": 1}, 400, "temprature"),
        ({"prompt": "a" * 500}, 400, "context of 96"),
        ({"prompt": "a" * 30_000}, 400, "30000 characters do not fit"),
        ({"prompt": [5, 400]}, 400, "outside 0 to 256"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "at least one token"),
        ({}, 400, "prompt"),
        ({"prompt": "a", "stop": [""]}, 400, "stop"),
        ({"prompt": "a", "model": "gpt-9"}, 404, "does not exist"),
        ({"prompt": ["a", "b", "a" * 500]}, 400, "prompt 2 has 500 tokens; with max_tokens=16 it exceeds the model's context of 96"),
        ({"prompt": ["a", "a" * 30_000]}, 400, "prompt 1: 30000 characters do not fit"),
        ({"prompt": [[5], [5, 6, 400]]}, 400, "prompt 1: token id 400 at position 2"),
        ({"prompt": ["a", ""]}, 400, "prompt 1 must have at least one token"),
        ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, 400, "fewer than min_tokens=3"),
        ({"prompt": ["a"] * 17, "n": 4}, 400, "at most 64 answers in one request, got 17 prompts times 4"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options: needs stream: true"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of is not supported"),
        ({"prompt": "a", "seed": 2**63}, 400, "seed"),
    ],
)
def test_bad_requests_get_one_line(serving: Callable[..., str], body: dict[str, Any], status: int, why: str) -> None:
    address = serving()
    answer = post(address, **body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == status and why in message and "\n" not in message and "Traceback" not in message
    assert post(address, prompt="a", max_tokens=2).status_code == 200, "the server goes on"


def test_what_is_no_request(serving: Callable[..., str]) -> None:
    address = serving(body_bytes=10_000, idle_seconds=0.5)
    for content, status in ((b"{", 400), (b"[1]", 400), (b"[" * 5000, 400), (b"x" * 20_000, 413)):
        answer = httpx.post(f"{address}/v1/completions", content=content, timeout=30)
        assert answer.status_code == status and "message" in answer.json()["error"]

    def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    assert httpx.post(f"{address}/v1/completions", content=chunks(), timeout=30).status_code == 413
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        slow.settimeout(10)
        assert b"408" in slow.recv(4096).splitlines()[0]
    assert httpx.get(f"{address}/nowhere", timeout=30).status_code == 404
    assert httpx.get(f"{address}/v1/completions", timeout=30).status_code == 405


def test_a_key(serving: Callable[..., str]) -> None:
    address = serving(key="secret")
    assert post(address, prompt="a", max_tokens=2).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        client(address, "secre").completions.create(model="tiny", prompt="a")
    assert client(address, "secret").completions.create(model="tiny", prompt="a", max_tokens=2).choices
    assert httpx.get(f"{address}/health", timeout=30).json() == {"status": "ok"}


def test_too_many_wait(scheduler: Scheduler, serving: Callable[..., str]) -> None:
    scheduler.most_waiting = 0
    answer = post(serving(), prompt="a")
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"


def test_an_answer_may_not_take_for_ever(serving: Callable[..., str], scheduler: Scheduler) -> None:
    answer = post(serving(seconds=0.0), prompt="a", max_tokens=80)
    assert answer.status_code == 504
    until = time.monotonic() + 10
    while scheduler.running:
        assert time.monotonic() < until, "the request is cancelled"
        time.sleep(0.01)


def test_metrics_and_page(serving: Callable[..., str]) -> None:
    address = serving()
    post(address, prompt="abc", max_tokens=5, temperature=0)
    text = httpx.get(f"{address}/metrics", timeout=30).text
    assert 'fullband_http_requests_total{path="/v1/completions",status="200"} 1.0' in text and "fullband_new_tokens_total 5.0" in text
    page = httpx.get(address, timeout=30)
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    assert "http://" not in page.text and "https://" not in page.text, "nothing comes from elsewhere"
    assert httpx.get(serving(playground=False), timeout=30).status_code == 404


def test_half_a_surrogate_pair_is_no_text(serving: Callable[..., str]) -> None:
    address = serving()
    for body in (b'{"prompt":"a","model":"\\ud800"}', b'{"prompt":"\\udc00"}', b'{"prompt":"a","stop":"\\ud83d"}'):
        assert httpx.post(f"{address}/v1/completions", content=body, timeout=30).status_code == 400
    whole = httpx.post(f"{address}/v1/completions", content=b'{"prompt":"\\ud83d\\ude00","max_tokens":1}', timeout=30)
    assert whole.status_code == 200 and whole.json()["usage"]["prompt_tokens"] == 4


def test_without_a_seed_draws_differ(serving: Callable[..., str]) -> None:
    asked: dict[str, Any] = {"prompt": ["abc"] * 3, "max_tokens": 20, "temperature": 30.0}
    address = serving()
    texts = [choice["text"] for _ in range(2) for choice in post(address, **asked).json()["choices"]]
    assert len(set(texts)) == 6
    assert len({post(address, **asked, seed=3).json()["choices"][0]["text"] for _ in range(2)}) == 1


def test_more_prompts_than_may_ever_wait_are_no_case_of_retrying(serving: Callable[..., str], scheduler: Scheduler) -> None:
    answer = post(serving(), prompt=["a"] * 1000)
    assert answer.status_code == 400 and "at most 64 prompts" in answer.json()["error"]["message"]
    assert not scheduler.counters.requests


def test_offsets_go_on_through_a_stream(serving: Callable[..., str]) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 0}
    api = client(serving())
    whole = api.completions.create(**asked).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in api.completions.create(**asked, stream=True)]
    assert whole and whole.text_offset and whole.text_offset[:4] == [0, 1, 2, 3]
    assert [offset for part in parts if part for offset in part.text_offset or []] == whole.text_offset


def test_errors_of_no_route_are_openais_and_a_model_is_found_by_name(serving: Callable[..., str]) -> None:
    address = serving()
    for answer, status in ((httpx.get(f"{address}/nowhere"), 404), (httpx.get(f"{address}/v1/completions"), 405)):
        assert answer.status_code == status and "/" in answer.json()["error"]["message"]
    assert client(address).models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client(address).models.retrieve("other")


def test_a_stream_whose_client_left_before_its_first_byte_is_closed(scheduler: Scheduler) -> None:
    """The response's generator never begins, so it can't be what ends the request."""
    from fullband.serve.answers import Stream, Streamed

    async def chunks() -> Any:
        yield "never"

    async def send(message: Any) -> None:
        raise OSError("gone")

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def main() -> None:
        opened = Stream.open(scheduler, prompt=[97], options=GenerateOptions(max_new_tokens=90, stop_ids=[]))
        with contextlib.suppress(Exception):
            await Streamed(chunks(), [opened], time.monotonic() + 60)({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
        assert not opened.left

    asyncio.run(main())
    until = time.monotonic() + 10
    while scheduler.counters.cancelled < 1:
        assert time.monotonic() < until
        time.sleep(0.01)
