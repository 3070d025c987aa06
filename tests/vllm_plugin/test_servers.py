"""One model behind our own server and behind vLLM's, by `fullband serve`: what OpenAI's client gets, and what many clients at once do.

Answers are compared with the model alone (float32, near-isometric weights), so the two servers' are each other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_plugin.asking import MODES, expected, prompts
from vllm_plugin.serving import Server

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vLLM is not installed")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}w7"


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


@pytest.fixture(scope="module")
def spoken(folder: Path) -> Path:
    """The folder with a tokenizer, of words w0 to w511, and a chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["own", "vllm"])
def server(request: pytest.FixtureRequest, spoken: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(request.param, spoken, tmp_path_factory.mktemp("log") / "log", {"fused": "whole"})
    yield made
    made.stop()


@pytest.fixture(scope="module")
def api(server: Server, spoken: Path) -> Any:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


PROMPT = [5, 400, 33, 9, 77, 12, 300, 2, 41]


@pytest.mark.parametrize(("mode", "passes"), MODES)
def test_completions_in_every_mode(server: Server, api: Any, here: Any, spoken: Path, mode: str, passes: int | None) -> None:
    asked = {"model": spoken.name, "max_tokens": 30, "temperature": 0, "extra_body": server.of_mode(mode, passes)}
    right = words(expected(here, [PROMPT], mode, passes, 30)[0])
    whole = api.completions.create(prompt=words(PROMPT), logprobs=1, **asked)
    assert whole.choices[0].text.split() == right.split()
    assert whole.usage.completion_tokens == 30 and whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].logprobs.token_logprobs) == 30
    assert api.completions.create(prompt=PROMPT, **asked).choices[0].text.split() == right.split(), "a prompt as ids"
    streamed = api.completions.create(prompt=words(PROMPT), stream=True, stream_options={"include_usage": True}, **asked)
    chunks = list(streamed)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices).split() == right.split()
    assert chunks[-1].usage.completion_tokens == 30


@pytest.mark.parametrize(("mode", "passes"), MODES)
def test_chat_in_every_mode(server: Server, api: Any, here: Any, spoken: Path, mode: str, passes: int | None) -> None:
    right = words(expected(here, [[*PROMPT, 7]], mode, passes, 20)[0])
    asked = {"model": spoken.name, "max_tokens": 20, "temperature": 0, "extra_body": server.of_mode(mode, passes)}
    messages = [{"role": "user", "content": words(PROMPT)}]
    assert api.chat.completions.create(messages=messages, **asked).choices[0].message.content.split() == right.split()
    streamed = api.chat.completions.create(messages=messages, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices).split() == right.split()


def test_without_a_mode_it_is_the_models(server: Server, api: Any, here: Any, spoken: Path) -> None:
    found = api.completions.create(model=spoken.name, prompt=words(PROMPT), max_tokens=20, temperature=0)
    assert found.choices[0].text.split() == words(expected(here, [PROMPT], "soft", None, 20)[0]).split()


def test_a_seed_gives_the_same_draws_again(server: Server, api: Any, spoken: Path) -> None:
    def drawn(seed: int) -> str:
        asked = {"model": spoken.name, "max_tokens": 20, "temperature": 1.0, "seed": seed, "extra_body": server.of_mode("soft")}
        return str(api.completions.create(prompt=words(PROMPT), **asked).choices[0].text)

    assert drawn(3) == drawn(3) != drawn(4)


@pytest.mark.parametrize(
    "extra", [{"mode": "sofd"}, {"mode": "soft", "feedback_passes": 2}, {"mode": "fused", "feedback_passes": -1}, {"mode": 3}]
)
def test_wrong_modes_are_refused(server: Server, api: Any, here: Any, spoken: Path, extra: dict[str, Any]) -> None:
    body = {"vllm_xargs": extra} if server.engine == "vllm" else extra
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model=spoken.name, prompt="w1 w2", max_tokens=5, extra_body=body)
    assert "Traceback" not in str(refused.value)
    test_without_a_mode_it_is_the_models(server, api, here, spoken)


def test_beam_search_is_refused(server: Server, api: Any, spoken: Path) -> None:
    with pytest.raises(openai.BadRequestError):
        asked = {"use_beam_search": True, **server.of_mode("soft")}
        api.completions.create(model=spoken.name, prompt="w1 w2", n=2, max_tokens=5, temperature=0, extra_body=asked)


def test_the_page_says_what_it_stands_before(server: Server) -> None:
    assert "Soft" in httpx.get(f"{server.address}/").text
    about = httpx.get(f"{server.address}/fullband/about").json()
    assert about["mode"] == "soft" and about["chat"] is True and about["max_model_len"] == 256
    assert about["engine"] == ("vllm" if server.engine == "vllm" else "fullband") and about["states"] is (server.engine == "own")
    assert about["model"] == httpx.get(f"{server.address}/v1/models").json()["data"][0]["id"]


@pytest.mark.parametrize("seed", [0])
def test_two_hundred_at_once(server: Server, here: Any, spoken: Path, seed: int) -> None:
    """Random lengths and modes; a third is cut off, goes away before it has read anything, or is malformed."""
    draw = random.Random(seed)
    given = [
        ([draw.randrange(512) for _ in range(draw.randint(1, 120))], MODES[draw.randrange(4)], draw.randint(1, 40)) for _ in range(200)
    ]
    kinds = [draw.choice(["whole", "whole", "whole", "whole", "cut", "leaves", "malformed"]) for _ in given]

    async def one(client: Any, number: int) -> tuple[int, str]:
        prompt, mode, new = given[number]
        body = {"model": spoken.name, "prompt": words(prompt), "max_tokens": new, "temperature": 0, **server.of_mode(*mode)}
        if kinds[number] == "malformed":
            wrong = draw.choice([{**body, "temperature": "hot"}, {**body, "max_tokens": -3}, {**body, "prompt": {}}, [1], {**body, "n": 0}])
            return (await client.post("/v1/completions", json=wrong)).status_code, ""
        if kinds[number] == "leaves":
            with contextlib.suppress(httpx.TransportError):
                await client.post("/v1/completions", json=body, timeout=0.05)
            return 0, ""
        if kinds[number] == "cut":
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 100}) as answer:
                async for _ in answer.aiter_bytes():
                    return 0, ""
        answer = await client.post("/v1/completions", json=body)
        return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text

    async def all_of_them() -> list[tuple[int, str]]:
        limits = httpx.Limits(max_connections=250)
        async with httpx.AsyncClient(base_url=server.address, timeout=120, limits=limits) as client:
            return list(await asyncio.gather(*(one(client, number) for number in range(len(given)))))

    for (prompt, mode, new), kind, (status, text) in zip(given, kinds, asyncio.run(all_of_them()), strict=True):
        if kind == "malformed":
            assert status in (400, 422)
        elif kind == "whole":
            assert status == 200, text
            assert text.split() == words(expected(here, [prompt], *mode, new)[0]).split(), (len(prompt), mode, new)
    for _ in range(100):
        if server.running() == 0:
            return
        time.sleep(0.1)
    raise AssertionError("requests of clients that are gone still run")


@pytest.mark.parametrize(("mode", "passes"), MODES)
def test_rollouts_bear_the_log_probabilities_of_sampling(server: Server, here: Any, mode: str, passes: int | None) -> None:
    from fullband.evaluate.mismatch import mismatch_by_passes
    from fullband.serve.client import Client

    sampled = Client(server.address).sample(prompts(4), 12, mode, passes, n=2, seed=3)
    exact, none = mismatch_by_passes(here, sampled, mode, passes, ["exact", 0])
    assert exact.tokens == 96 and exact.largest < 1e-4 and exact.outside == 0
    assert (none.largest < 1e-4) if mode == "standard" else (none.largest > 0.01)
