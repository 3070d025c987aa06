"""Two hundred clients at once, many of them rude: every answer is that of the request alone, and memory returns to where it was."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch

from fullband.data.tokenizers import ByteTokenizer
from fullband.decode import generate_texts
from fullband.model import FullBandModel
from fullband.serve.engine import LocalEngine
from fullband.serve.scheduler import Scheduler
from serve.conftest import CONTEXT
from serve.test_scheduler import MODES, settle

STEMS = [
    "",
    "instructions for all of them: ",
    "instructions for some of them, which are longer: ",
    "something else that is asked again and again: ",
]
KEPT = 400_000  # bytes: some dozen prompts, so that some are found and some have gone
KINDS = ["whole", "whole", "stream", "stream", "samples", "impatient", "leaves a stream", "half a body", "malformed", "refused"]


@pytest.fixture(params=[0, KEPT], ids=["nothing kept", "beginnings kept"])
def busy(request: pytest.FixtureRequest, served_model: FullBandModel) -> Iterator[Scheduler]:
    made = Scheduler(LocalEngine(served_model, chunk=16, prefix_bytes=request.param), ByteTokenizer(), most_rows=6, most_waiting=300)
    yield made
    made.close(timeout=20)


def held(scheduler: Scheduler) -> int:
    """Bytes of all tensors that are alive, but for the prompts that are kept on purpose."""
    gc.collect()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor}
    return sum(storages.values()) - scheduler.engine.kept_bytes


class Clients:
    """What they ask, how they behave, and what they were answered."""

    def __init__(self, address: str, seed: int):
        self.address, self.draw = address, random.Random(seed)
        self.answers: list[tuple[dict[str, Any], list[str]]] = []

    def body(self) -> dict[str, Any]:
        mode, passes = self.draw.choice(MODES)
        prompt = self.draw.choice(STEMS) + "".join(self.draw.choice("abcdef ") for _ in range(self.draw.randrange(1, 30)))
        asked = {"prompt": prompt, "mode": mode, "max_tokens": self.draw.randrange(1, 12), "temperature": 0}
        return asked | ({"feedback_passes": passes} if passes else {})

    async def one(self, web: httpx.AsyncClient, kind: str) -> None:
        url, body = f"{self.address}/v1/completions", self.body()
        if kind == "whole":
            answer = await web.post(url, json=body)
            self.answers.append((body, [choice["text"] for choice in answer.json()["choices"]]))
        elif kind == "samples":
            body |= {"n": 3, "temperature": 0.8, "seed": 5}
            answer = await web.post(url, json=body)
            self.answers.append((body, [choice["text"] for choice in answer.json()["choices"]]))
        elif kind in ("stream", "leaves a stream"):
            text = ""
            async with web.stream("POST", url, json=body | {"stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if kind == "leaves a stream":
                        return
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            self.answers.append((body, [text]))
        elif kind == "impatient":
            with contextlib.suppress(httpx.TimeoutException):
                await web.post(url, json=body | {"max_tokens": 30}, timeout=0.05)
        elif kind == "half a body":
            host, _, port = self.address.removeprefix("http://").partition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            await asyncio.sleep(self.draw.random() / 5)
            transport: Any = writer.transport
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            transport.abort()
        else:
            content = json.dumps(body)[:-3] if kind == "malformed" else json.dumps(body | {"prompt": "x" * (CONTEXT + 1)})
            answer = await web.post(url, content=content)
            assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"]

    async def all_of_them(self, count: int) -> None:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(timeout=120, limits=limits) as web:
            await asyncio.gather(*(self.one(web, KINDS[number % len(KINDS)]) for number in range(count)))


def test_two_hundred_at_once(served_model: FullBandModel, busy: Scheduler, serving: Callable[..., str]) -> None:
    address = serving(scheduler=busy)
    asyncio.run(Clients(address, seed=7).all_of_them(20))
    settle(busy)
    before = held(busy)
    clients = Clients(address, seed=1)
    asyncio.run(clients.all_of_them(200))
    assert len(clients.answers) == 100
    for body, texts in clients.answers:
        options = {name: body[name] for name in ("temperature", "seed", "n") if name in body}
        expected = [
            one.text
            for one in generate_texts(
                served_model,
                ByteTokenizer(),
                [body["prompt"]],
                body["mode"],
                body.get("feedback_passes"),
                max_new_tokens=body["max_tokens"],
                **options,
            )
        ]
        assert texts == expected, body
    settle(busy)
    assert all(group.state is None for group in busy._groups.values()) and not busy._entering
    assert held(busy) <= before
    limit = busy.engine.prefixes.limit  # type: ignore[attr-defined]
    assert busy.engine.kept_bytes <= limit and (busy.counters.prefix_hits > 20 if limit else not busy.counters.prefix_hits)
    assert busy.counters.cancelled > 5
