"""Clients that talk slowly, or not at all, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from fullband.serve.connections import Connection, allow_connections
from serve.test_api import post

SECONDS = 0.6
BODY = b'{"prompt": "abc", "max_tokens": 2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(BODY)


def connect(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    made = socket.create_connection((host, int(port)), timeout=10)
    made.settimeout(10)
    return made


def closed_after(connection: socket.socket, sent: Iterable[bytes], pause: float = 0.1) -> float:
    """Seconds until the server closes a connection that sends these parts one by one, and then nothing."""
    begun, parts = time.monotonic(), iter(sent)
    connection.settimeout(pause)
    while time.monotonic() - begun < 10:
        try:
            if not connection.recv(65536):
                break
        except TimeoutError:
            part = next(parts, b"")
            if part:
                connection.sendall(part)
        except OSError:
            break
    return time.monotonic() - begun


def letters(text: bytes) -> Iterable[bytes]:
    return (text[place : place + 1] for place in range(len(text)))


@pytest.mark.parametrize(
    "sent",
    [[], [b"POST /v1/comp"], letters(HEAD + b"X: " + b"y" * 200), [HEAD + b"\r\n" + BODY], [HEAD + b"\r\n" + BODY + b"GET / HT"]],
    ids=["silent", "a part", "letter by letter", "silent after an answer", "a part after an answer"],
)
def test_headers_have_to_arrive_in_time(serving: Callable[..., str], sent: Iterable[bytes]) -> None:
    with connect(serving(idle_seconds=SECONDS)) as connection:
        assert SECONDS * 0.9 < closed_after(connection, sent) < 5 * SECONDS


def test_a_second_request_may_be_slow_only_once(serving: Callable[..., str]) -> None:
    """The time is not begun anew by each letter, after an answer either."""
    with connect(serving(idle_seconds=SECONDS)) as connection:
        connection.sendall(HEAD + b"\r\n" + BODY)
        assert b"200 OK" in connection.recv(65536)
        assert closed_after(connection, letters(HEAD + b"X: " + b"y" * 200)) < 5 * SECONDS


def test_a_body_that_goes_on_after_its_answer_ends(serving: Callable[..., str]) -> None:
    with connect(serving(idle_seconds=SECONDS)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        assert b"413" in connection.recv(65536)
        assert closed_after(connection, letters(b"x" * 200)) < 5 * SECONDS


def test_an_answer_that_nobody_takes_ends(serving: Callable[..., str]) -> None:
    """It is more than the system's buffers hold."""
    body = b"x" * 50_000_000

    with connect(serving(app=PlainTextResponse(body), idle_seconds=SECONDS)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in connection.recv(1000)
        time.sleep(4 * SECONDS)
        got = 0
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(2**20):
                got += len(part)
        assert got < len(body) // 2


def test_a_stream_that_breaks_off_unheard_ends(serving: Callable[..., str]) -> None:
    """What was written is thrown away, though its client still holds the connection."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                while True:
                    await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})

    def connections() -> int:
        gc.collect()
        return sum(isinstance(thing, Connection) for thing in gc.get_objects())

    with connect(serving(app=app, idle_seconds=SECONDS)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in connection.recv(1000)
        until = time.monotonic() + 8 * SECONDS
        while connections():
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_request_in_several_parts_and_two_at_once_are_answered(serving: Callable[..., str]) -> None:
    with connect(serving(idle_seconds=5)) as connection:
        for part in (HEAD[:20], HEAD[20:] + b"\r\n", BODY[:10], BODY[10:]):
            connection.sendall(part)
            time.sleep(0.05)
        assert b"200 OK" in connection.recv(65536)
        connection.sendall((HEAD + b"\r\n" + BODY) * 2)
        got = b""
        while got.count(b"200 OK") < 2:
            got += connection.recv(65536)


def test_answers_may_take_longer_than_headers(serving: Callable[..., str], scheduler: object, monkeypatch: pytest.MonkeyPatch) -> None:
    step = scheduler.engine.step  # type: ignore[attr-defined]
    monkeypatch.setattr(scheduler.engine, "step", lambda *given: (time.sleep(0.1), step(*given))[1])  # type: ignore[attr-defined]
    address = serving(idle_seconds=0.3)
    assert post(address, prompt="abc", max_tokens=12, min_tokens=12).json()["usage"]["completion_tokens"] == 12
    with httpx.stream("POST", f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 9, "min_tokens": 9, "stream": True}) as got:
        assert b"[DONE]" in b"".join(got.iter_bytes())


def test_a_thousand_idle_connections_hold_nobody_up(serving: Callable[..., str]) -> None:
    """Half of them in the middle of their headers, and a quarter of a body."""
    resource = pytest.importorskip("resource")
    allow_connections()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 3000:
        pytest.skip("too few open files are allowed here")
    address = serving(idle_seconds=3)
    idle = []
    try:
        for number in range(1000):
            idle.append(connect(address))
            if number % 4:
                idle[-1].sendall((HEAD[:30], HEAD[:40], HEAD + b"\r\n{")[number % 4 - 1])
        begun = time.monotonic()
        assert post(address, prompt="abc", max_tokens=4).status_code == 200
        assert time.monotonic() - begun < 2.5, "before any of them is closed"
        until = time.monotonic() + 15
        for connection in idle:
            connection.settimeout(max(0.1, until - time.monotonic()))
            while connection.recv(65536):
                pass
        assert time.monotonic() < until
    finally:
        for connection in idle:
            connection.close()
    assert post(address, prompt="abc", max_tokens=4).status_code == 200


def test_open_files_are_allowed_for_connections() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        allow_connections(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        allow_connections(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
