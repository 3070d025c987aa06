"""OpenAI's own clients, with and without asyncio: in every mode, streaming, patient with a full server, and gone in the middle."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from fullband.model import FullBandModel
from fullband.serve.scheduler import Scheduler
from serve.test_api import TEMPLATE, alone, client
from serve.test_scheduler import MODES, settle


def asyncio_client(address: str, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=max_retries)


def of_mode(mode: str, passes: Any) -> dict[str, Any]:
    return {"mode": mode} | ({"feedback_passes": passes} if passes else {})


def test_answers_in_every_mode_side_by_side(served_model: FullBandModel, serving: Callable[..., str], scheduler: Scheduler) -> None:
    """Whole and streamed, completions and chat, all at once."""
    address = serving(template=TEMPLATE)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 10, "temperature": 0}
    messages: Any = [{"role": "user", "content": "hello there"}]

    async def completion(api: openai.AsyncOpenAI, mode: str, passes: Any) -> str:
        return (await api.completions.create(prompt="hello", extra_body=of_mode(mode, passes), **asked)).choices[0].text

    async def completion_streamed(api: openai.AsyncOpenAI, mode: str, passes: Any) -> str:
        stream = await api.completions.create(prompt="hello", stream=True, extra_body=of_mode(mode, passes), **asked)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def chat(api: openai.AsyncOpenAI, mode: str, passes: Any) -> str:
        whole = await api.chat.completions.create(messages=messages, extra_body=of_mode(mode, passes), **asked)
        return whole.choices[0].message.content or ""

    async def chat_streamed(api: openai.AsyncOpenAI, mode: str, passes: Any) -> str:
        stream = await api.chat.completions.create(messages=messages, stream=True, extra_body=of_mode(mode, passes), **asked)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with asyncio_client(address) as api:
            ways = (completion, completion_streamed, chat, chat_streamed)
            return list(await asyncio.gather(*(way(api, *mode) for mode in MODES for way in ways)))

    found = iter(asyncio.run(all_of_them()))
    for mode, passes in MODES:
        plain = alone(served_model, "hello", mode, passes, max_new_tokens=10)
        chatted = alone(served_model, "user:hello there\na:", mode, passes, max_new_tokens=10)
        assert [next(found) for _ in range(4)] == [plain, plain, chatted, chatted]
    settle(scheduler)


@pytest.mark.parametrize("kind", ["plain", "asyncio"])
def test_a_full_server_is_asked_again_after_the_time_that_it_names(scheduler: Scheduler, serving: Callable[..., str], kind: str) -> None:
    address, scheduler.most_waiting = serving(), 0
    asked: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 3}
    threading.Timer(0.5, setattr, (scheduler, "most_waiting", 64)).start()
    begun = time.monotonic()
    if kind == "plain":
        found = client(address, max_retries=2).completions.create(**asked)
    else:
        found = asyncio.run(asyncio_client(address, 2).completions.create(**asked))
    assert found.choices and 1 <= time.monotonic() - begun < 5, "Retry-After is a second"
    scheduler.most_waiting = 0
    with pytest.raises(openai.RateLimitError):
        client(address).completions.create(**asked)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_stream_that_is_closed_ends_its_request(scheduler: Scheduler, serving: Callable[..., str], kind: str, slow: None) -> None:
    api = client(serving(template=TEMPLATE))
    asked: Any = {"model": "tiny", "max_tokens": 60, "stream": True, "extra_body": {"min_tokens": 60}}
    if kind == "chat":
        stream: Any = api.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **asked)
    else:
        stream = api.completions.create(prompt="hi", **asked)
    next(iter(stream))
    assert scheduler.running == 1
    stream.close()
    settle(scheduler)
    assert scheduler.counters.cancelled == 1 and scheduler.counters.new_tokens < 60


def test_tasks_that_are_cancelled_end_their_requests(scheduler: Scheduler, serving: Callable[..., str], slow: None) -> None:
    """A stream that is left in the middle, one that is closed, and an answer that is waited for no longer."""
    address = serving()
    asked: Any = {"model": "tiny", "prompt": "hi", "max_tokens": 60, "extra_body": {"min_tokens": 60}}

    async def main() -> None:
        async with asyncio_client(address) as api:

            async def streamed() -> None:
                async for _ in await api.completions.create(stream=True, **asked):
                    pass

            tasks = [asyncio.create_task(streamed()), asyncio.create_task(api.completions.create(**asked))]
            closed = await api.completions.create(stream=True, **asked)
            await anext(aiter(closed))
            while scheduler.running < 3:
                await asyncio.sleep(0.01)
            await closed.close()
            for task in tasks:
                task.cancel()
            assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))

    asyncio.run(main())
    settle(scheduler)
    assert scheduler.counters.cancelled == 3 and scheduler.counters.new_tokens < 3 * 60


@pytest.fixture
def slow(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer takes seconds."""
    step = scheduler.engine.step
    monkeypatch.setattr(scheduler.engine, "step", lambda *given: (time.sleep(0.05), step(*given))[1])
