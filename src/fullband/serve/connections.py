"""Connections of the server: each has to send a whole request's headers in time, however slowly its client talks or listens."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's connection, which has no bound of its own on headers, on a body that goes on after its answer, and on an answer that nobody
    takes. While there is no request to answer, the next one's headers must be whole within `timeout_keep_alive` seconds; as many more may
    pass until what was written is taken."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._served, self.app = self.app, self._serve
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_longer()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        self._wait_no_longer()
        try:
            await self._served(scope, receive, send)
        finally:
            if self.cycle.scope is scope:  # the next request has not come already
                self._wait()

    def _wait(self) -> None:
        self._wait_no_longer()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._end)

    def _wait_no_longer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _end(self) -> None:
        self.transport.close()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)


def web_config(app: Any, seconds: float, **options: Any) -> uvicorn.Config:
    """How uvicorn serves the application: `seconds` for headers, and for what is begun when it is told to stop."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="warning",
        server_header=False,
        timeout_keep_alive=seconds,  # type: ignore[arg-type]  # goes to call_later
        timeout_graceful_shutdown=30,
        **options,
    )


def allow_connections(most: int = 8192) -> None:
    """As many open files as the system lets, up to `most`: each connection is one, and some systems begin with 256."""
    if importlib.util.find_spec("resource") is None:  # Windows, which has no such limit
        return
    resource = importlib.import_module("resource")  # by name: not on every system
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
