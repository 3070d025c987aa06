"""Bodies that are meant to hurt: each gets one short line and a status, soon, and the server goes on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

from fullband.decode.modes import resolve_mode
from fullband.model import FullBandModel
from fullband.serve.engine import LocalEngine
from serve.test_api import TEMPLATE, post

COMPLETIONS, CHAT, PASSES, CARRIED = "/v1/completions", "/v1/chat/completions", "/fullband/passes", "/fullband/carried"
KEYS = b",".join(b'"k%d":1' % number for number in range(300_000))


def asked(**body: Any) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        (COMPLETIONS, b'{"prompt":"a","temperature":NaN}', "temperature: must be a finite number"),
        (COMPLETIONS, b'{"prompt":"a","temperature":1e999}', "temperature: must be a finite number"),
        (COMPLETIONS, b'{"prompt":"a","max_tokens":' + b"9" * 4000 + b"}", "a number of 4000 digits"),
        (COMPLETIONS, b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}", "not valid JSON"),
        (COMPLETIONS, b'{"prompt":[' + b"9" * 4000 + b"]}", "token id 99999"),
        (COMPLETIONS, b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
        (COMPLETIONS, b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}", "prompt: must be a text"),
        (COMPLETIONS, b'{"prompt":[' + b"[]," * 2_000_000 + b"[]]}", "prompt: must be at most 65536 prompts"),
        (COMPLETIONS, b'{"prompt":[' + b"1," * 2_000_000 + b"1]}", "prompt 0 has 2000001 tokens"),
        (COMPLETIONS, b'{"prompt":[' + b"1," * 2_000_000 + b'"a"]}', "prompt: must be a text"),
        (COMPLETIONS, asked(prompt=[True]), "prompt: must be a text"),
        (COMPLETIONS, b'{"prompt":"a","stop":[' + b"1," * 2_000_000 + b"1]}", "stop.0: must be text"),
        (COMPLETIONS, asked(prompt="a", stop=["x"] * 17), "stop: must be text or must have at most 16 items, not 17"),
        (COMPLETIONS, b"{" + KEYS + b"}", "at most 128 fields, got 300000"),
        (COMPLETIONS, b'{"prompt":"a","stream":true,"stream_options":{' + KEYS + b"}}", "at most 128 fields, got 300000"),
        (COMPLETIONS, asked(prompt="a", **{"k" * 100_000: 1}), "kkk"),
        (COMPLETIONS, asked(prompt="a", **{"two\nlines": 1}), "two lines: unknown key"),
        (COMPLETIONS, asked(prompt="a", feedback_passes=65), "feedback_passes: must be at most 64, or 'exact' or 'converged'"),
        (COMPLETIONS, asked(prompt="a", feedback_passes=10**40), "feedback_passes"),
        (COMPLETIONS, asked(prompt=["a" * 90] * 64, echo=True, max_tokens=0, logprobs=20, n=4), "at most 64 answers"),
        (COMPLETIONS, b'{"prompt":"\xed\xa0\x80"}', "not valid JSON"),
        (COMPLETIONS, '{"prompt":"a"}'.encode("utf-16"), "not valid JSON"),
        (CHAT, b'{"messages":[{' + KEYS + b"}]}", "at most 128 fields, got 300000"),
        (CHAT, asked(messages=[{"role": "user", "content": "a"}] * 5000), "messages: must have at most 4096 items, not 5000"),
        (CHAT, b'{"messages":[' + b"1," * 2_000_000 + b"1]}", "messages.0"),
        (CHAT, b'{"messages":[{"role":"user","content":[' + b"1," * 2_000_000 + b"1]}]}", "messages.0.content.0"),
        (CARRIED, b'{"prompt":[' + b'"a",' * 1_000_000 + b'"a"],"answer":"a"}', "prompt.0: must be a whole number"),
        (CARRIED, asked(prompt="a", answer="a" * 1_000_000), "answer: 1000000 characters do not fit"),
        (CARRIED, asked(prompt="a", answer="a", mode="fused", feedback_passes=65), "feedback_passes: must be at most 64"),
        (PASSES, asked(text="a" * 1_000_000), "text: 1000000 characters do not fit"),
        (PASSES, b'{"text":"a",' + KEYS + b"}", "at most 128 fields"),
    ],
    ids=range(31),
)
def test_each_gets_a_line_soon(serving: Callable[..., str], path: str, content: bytes, why: str) -> None:
    address = serving(template=TEMPLATE)
    begun = time.monotonic()
    answer = httpx.post(address + path, content=content, timeout=60)
    took, message = time.monotonic() - begun, answer.json()["error"]["message"]
    assert answer.status_code == 400 and why in message and len(message) <= 500 and len(message.splitlines()) == 1
    assert took < 5, "others wait meanwhile"
    assert post(address, prompt="a", max_tokens=2).status_code == 200


def test_log_probabilities_of_prompts_have_a_bound(serving: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullband.serve.app.MOST_ECHOED", 50)
    address, body = serving(), {"prompt": ["abcd", "efgh"], "max_tokens": 0, "echo": True}
    assert "at most 50 log-probabilities" in post(address, **body, logprobs=6).json()["error"]["message"]
    assert post(address, **body, logprobs=5).status_code == 200 == post(address, **body).status_code


@torch.no_grad()
def test_costly_prompts_leave_others_their_turns(served_model: FullBandModel) -> None:
    """Many feedback passes, or one position at a time, are run in shorter parts."""
    for bytes_ in (0, 2**30):
        engine = LocalEngine(served_model, chunk=32, prefix_bytes=bytes_)
        for passes, parts in ((1, 1), (4, 4), (16, 16), ("exact", 16)):
            assert sum(done is None for done in engine.prefill([[5] * 32], resolve_mode("fused", passes))) == parts


def test_what_is_no_post_of_ours(serving: Callable[..., str]) -> None:
    """Other methods, other paths, bodies in parts, requests in a row, what is no HTTP."""
    address = serving()
    for method, path, status in (
        ("HEAD", "/health", 200),
        ("HEAD", COMPLETIONS, 405),
        ("OPTIONS", COMPLETIONS, 405),
        ("PUT", COMPLETIONS, 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("POST", "/v1/completions/", 404),
        ("GET", "/" + "a" * 60_000, 404),
        ("GET", "/%ff%0a%zz", 404),
        ("GET", "/v1/models/%ed%a0%80", 404),
    ):
        answer = httpx.request(method, address + path, timeout=30)
        assert answer.status_code == status and len(answer.text) < 1000
        assert "access-control-allow-origin" not in answer.headers and "location" not in answer.headers
    good = asked(prompt="a", max_tokens=2)
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    whole = request + b"Content-Length: %d\r\n\r\n" % len(good) + good
    letters = b"".join(b"1\r\n%c\r\n" % letter for letter in good) + b"0\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    for sent, answers in (
        (request + b"Transfer-Encoding: chunked\r\n\r\n" + letters + last, [b"200", b"200"]),
        (whole * 3 + last, [b"200"] * 4),
        (whole + b"no request\r\n\r\n", [b"200", b"400"]),
        (request + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", [b"400"]),
        (request + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n", [b"400"]),
        (request + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", [b"400"]),
        (request + b"Content-Length: -5\r\n\r\n", [b"400"]),
        (request + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", [b"400"]),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", [b"400"]),
    ):
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(sent)
            got = b""
            while part := connection.recv(65536):
                got += part
        assert [part.split()[0] for part in got.split(b"HTTP/1.1 ")[1:]] == answers, sent[:200]
    assert post(address, prompt="a", max_tokens=2).status_code == 200
