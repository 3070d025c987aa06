"""From prompts to an HTTP answer, whole or streamed, that ends its requests however it ends."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fullband.decode.options import GenerateOptions
from fullband.serve.errors import APIError
from fullband.serve.replies import Reply
from fullband.serve.rows import Event, Request
from fullband.serve.scheduler import Scheduler
from fullband.serve.schemas import ChatRequest, CompletionRequest

T = TypeVar("T")


@dataclass
class Stream:
    """The events of one prompt, brought from the scheduler's thread to the loop."""

    scheduler: Scheduler
    request: Request
    queue: asyncio.Queue[Event]
    left: set[int] = field(default_factory=set)

    @classmethod
    def open(cls, scheduler: Scheduler, **request: Any) -> Stream:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        made = Request(emit=emit, **request)
        scheduler.submit(made)
        return cls(scheduler, made, queue, set(range(made.options.n)))

    async def events(self, until: float) -> AsyncIterator[Event]:
        """Events until all rows have ended. Whatever ends this early cancels the request. Raises APIError."""
        try:
            while self.left:
                try:
                    event = await asyncio.wait_for(self.queue.get(), max(0.0, until - time.monotonic()))
                except TimeoutError:
                    raise APIError(504, "the answer took longer than this server allows", "timeout_error") from None
                if event.error is not None:
                    self.left.clear()
                    raise APIError(400 if "in the model" not in event.error else 500, event.error)
                if event.finish_reason is not None:
                    self.left.discard(event.row)
                yield event
        finally:
            self.close()

    def close(self) -> None:
        """What has not ended is cancelled."""
        if self.left:
            self.left.clear()
            self.scheduler.cancel(self.request)


class Streamed(StreamingResponse):
    """Closes its streams however it ends: also for a client that left before the first byte, or reads nothing until the time is over."""

    def __init__(self, chunks: AsyncIterator[str], opened: Sequence[Stream], until: float):
        super().__init__(chunks, media_type="text/event-stream")
        self._opened, self._until = opened, until

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # a second more, in which the chunks say themselves that the time is over
            async with asyncio.timeout(max(0.0, self._until - time.monotonic()) + 1):
                await super().__call__(scope, receive, send)
        except (TimeoutError, asyncio.CancelledError):
            pass  # the time is over, or the server stops: it closes a connection whose answer is not complete
        finally:
            for stream in self._opened:
                stream.close()


async def respond(
    http: HTTPRequest,
    scheduler: Scheduler,
    reply: Reply,
    ids: Sequence[list[int]],
    options: GenerateOptions,
    asked: CompletionRequest | ChatRequest,
    wants: dict[str, Any],
    seconds: float,
) -> Response:
    """Submit every prompt, then stream the answer, or gather it, within `seconds`. `wants`: what log-probabilities.

    Raises ValueError for what can't be served, APIError for what failed, ClientDisconnect.
    """
    until = time.monotonic() + seconds
    penalties = {"presence": asked.presence_penalty, "frequency": asked.frequency_penalty}
    scheduler.check(ids, options)
    opened: list[Stream] = []
    try:
        for tokens in ids:
            seeded = options if asked.seed is not None else replace(options, seed=secrets.randbits(63))
            opened.append(Stream.open(scheduler, prompt=tokens, options=seeded, **wants, **penalties))
    except ValueError:
        for stream in opened:
            stream.close()
        raise
    if asked.stream:
        return Streamed(_stream(reply, opened, until), opened, until)
    return JSONResponse(await unless_gone(http, _gather(reply, opened, until)))


async def unless_gone(http: HTTPRequest, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. For a client that goes away it is cancelled; raises ClientDisconnect."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_gone(http))
    try:
        done, _ = await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:  # nothing to do for one that is done
        watching.cancel()
        working.cancel()
    if working not in done:
        raise ClientDisconnect
    return working.result()


async def _gather(reply: Reply, opened: list[Stream], until: float) -> dict[str, Any]:
    try:
        for number, stream in enumerate(opened):
            async for event in stream.events(until):
                reply.take(number, event)
    finally:
        for stream in opened:
            stream.close()
    return reply.whole()


async def _stream(reply: Reply, opened: list[Stream], until: float) -> AsyncIterator[str]:
    """Server-sent events; an error in the middle is the last of them."""
    merged: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()

    async def pump(number: int, stream: Stream) -> None:
        try:
            async for event in stream.events(until):
                await merged.put((number, event))
            await merged.put(None)
        except APIError as error:
            await merged.put(error)

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(opened)]
    left = len(pumps)
    try:
        while left:
            found = await merged.get()
            if found is None:
                left -= 1
            elif isinstance(found, APIError):
                yield f"data: {json.dumps({'error': {'message': str(found), 'type': found.kind}})}\n\n"
                return
            elif isinstance(found, tuple):
                for chunk in reply.chunks(*found):
                    yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        for chunk in reply.last_chunks():
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        for task in pumps:
            task.cancel()


async def _gone(http: HTTPRequest) -> None:
    """Returns when the client has gone away."""
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            return
