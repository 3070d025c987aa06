"""The ASGI application: OpenAI's API over a `Scheduler`, with a key, limits and metrics. Errors are OpenAI's, in one line."""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fullband.data.chat_template import ChatTemplate, Message
from fullband.data.tokenizer import Tokenizer
from fullband.serve.engine import LocalEngine
from fullband.serve.metrics import Metrics
from fullband.serve.page import playground
from fullband.serve.replies import Reply, chat_reply, completion_reply
from fullband.serve.scheduler import Event, FullError, Request, Scheduler
from fullband.serve.schemas import MOST_FIELDS, ChatMessage, ChatRequest, CompletionRequest
from fullband.serve.views import CarriedRequest, ViewRequest, about_task, by_passes, carried
from fullband.serve.weights import ElsewhereError, WeightsRequest, replace_weights
from fullband.strict import parse

MOST_ECHOED = 2**20  # each is some hundred bytes, here and in the answer
LONGEST_TOKEN = 256  # characters, on average over a context: no text has longer ones


@dataclass(frozen=True)
class Settings:
    """What the server allows.

    name         of the model, in /v1/models
    mode         of requests that name none
    key          that requests must bear; None = none
    body_bytes   of a request's body, at most
    seconds      that an answer may take
    idle_seconds in which a request's headers have to arrive, and its body
    weights      folder below which weights may be taken that replace the model's; None = they stay. Needs a key
    """

    name: str
    mode: str = "soft"
    key: str | None = None
    body_bytes: int = 8 * 2**20
    seconds: float = 600.0
    idle_seconds: float = 30.0
    playground: bool = True
    weights: Path | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and not self.key:
            raise ValueError("weights are replaced only by whoever has a key: give one")


class APIError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", headers: dict[str, str] | None = None):
        line = " ".join(message.split())  # a client's own words may be among them
        super().__init__(line if len(line) <= 500 else f"{line[:499]}…")
        self.status, self.kind, self.headers = status, kind, headers

    def response(self) -> Response:
        error = {"message": str(self), "type": self.kind, "param": None, "code": None}
        return JSONResponse({"error": error}, self.status, self.headers)


@dataclass
class _Stream:
    """The events of one prompt, brought from the scheduler's thread to the loop."""

    scheduler: Scheduler
    request: Request
    queue: asyncio.Queue[Event]
    left: set[int] = field(default_factory=set)

    @classmethod
    def open(cls, scheduler: Scheduler, **request: Any) -> _Stream:
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


class _Streamed(StreamingResponse):
    """Closes its streams however it ends: also for a client that left before the first byte, or reads nothing until the time is over."""

    def __init__(self, chunks: AsyncIterator[str], opened: Sequence[_Stream], until: float):
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


async def _refused(http: HTTPRequest, error: Exception) -> Response:
    """What no route answers, or what a route did not expect."""
    if isinstance(error, HTTPException):
        return APIError(error.status_code, f"{http.method} {http.url.path}: {error.detail}", headers=dict(error.headers or {})).response()
    return APIError(500, "the server failed; its log has more", "server_error").response()


class Server:
    """The routes. `template` None = the model has none, and chat is refused."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, template: ChatTemplate | None, settings: Settings):
        self.scheduler, self.tokenizer, self.template, self.settings = scheduler, tokenizer, template, settings
        self.metrics, self.started = Metrics(scheduler), int(time.time())
        self._viewing = asyncio.Semaphore(1)  # each view evaluates the model many times
        self.updates = 0  # of the weights

    def app(self) -> Starlette:
        routes = [
            Route("/health", self._open(self.health), methods=["GET"]),
            Route("/metrics", self._open(self.show_metrics), methods=["GET"]),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self.one_model), methods=["GET"]),
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/fullband/weights", self._guarded(self.put_weights), methods=["POST"]),
        ]
        if self.settings.playground:
            routes.append(Route("/", self._open(self.page), methods=["GET"]))
            routes.append(Route("/fullband/about", self._guarded(self.about), methods=["GET"]))
            routes.append(Route("/fullband/passes", self._guarded(self.passes), methods=["POST"]))
            routes.append(Route("/fullband/carried", self._guarded(self.carried), methods=["POST"]))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _refused})
        app.router.redirect_slashes = False  # to wherever the Host header says
        return app

    def _open(self, answer: Callable[[HTTPRequest], Awaitable[Response]]) -> Callable[[HTTPRequest], Awaitable[Response]]:
        async def route(request: HTTPRequest) -> Response:
            begun = time.monotonic()
            try:
                response = await answer(request)
            except APIError as error:
                response = error.response()
            except FullError as error:
                response = APIError(429, str(error), "rate_limit_error", {"Retry-After": "1"}).response()
            except ValueError as error:
                response = APIError(400, str(error)).response()
            except ClientDisconnect:
                response = Response(status_code=499)
            except asyncio.CancelledError:  # by nobody but a server that stops and has waited long enough
                response = APIError(503, "the server is shutting down", "server_error").response()
            self.metrics.answered(request.url.path, response.status_code, time.monotonic() - begun)
            return response

        return route

    def _guarded(self, answer: Callable[[HTTPRequest], Awaitable[Response]]) -> Callable[[HTTPRequest], Awaitable[Response]]:
        async def checked(request: HTTPRequest) -> Response:
            key = self.settings.key
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if key is not None and not hmac.compare_digest(given.encode("latin-1"), key.encode()):
                raise APIError(401, "a key is needed: send it as Authorization: Bearer KEY", "authentication_error")
            return await answer(request)

        return self._open(checked)

    async def health(self, request: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, request: HTTPRequest) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type=self.metrics.media_type)

    async def page(self, request: HTTPRequest) -> Response:
        return HTMLResponse(playground())

    async def models(self, request: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def one_model(self, request: HTTPRequest) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._about())

    def _about(self) -> dict[str, Any]:
        return {
            "id": self.settings.name,
            "object": "model",
            "created": self.started,
            "owned_by": "fullband",
            "max_model_len": self.scheduler.engine.context,
            "chat": self.template is not None,
            "mode": self.settings.mode,
            "updates": self.updates,
        }

    async def completions(self, http: HTTPRequest) -> Response:
        asked = parse(CompletionRequest, await self._body(http), "request")
        self._check_model(asked.model)
        if asked.max_tokens == 0 and not asked.echo:
            raise ValueError("max_tokens: must be at least 1 unless echo is set, got 0")
        options = asked.options(self.settings.mode, max(1, asked.max_tokens))
        prompts, most = asked.prompt, max(1, self.scheduler.most_waiting)
        if len(prompts) > most:
            raise ValueError(f"prompt: must be at most {most} prompts in one request, got {len(prompts)}")
        if len(prompts) * asked.n > (most := max(most, self.scheduler.most_rows)):
            raise ValueError(f"n: must be at most {most} answers in one request, got {len(prompts)} prompts times {asked.n}")
        ids = await run_in_threadpool(self._tokens, prompts)
        reply = completion_reply(self.settings.name, self.tokenizer, asked, ids)
        wants = {"logprobs": asked.logprobs, "prompt_logprobs": asked.echo and asked.logprobs is not None}
        told = sum(map(len, ids)) * asked.n * ((asked.logprobs or 0) + 1)
        if wants["prompt_logprobs"] and told > MOST_ECHOED:
            raise ValueError(f"echo, logprobs: must be at most {MOST_ECHOED} log-probabilities of prompts in one request, got {told}")
        return await self._answer(http, reply, ids, options, asked, wants)

    async def chat(self, http: HTTPRequest) -> Response:
        asked = parse(ChatRequest, await self._body(http), "request")
        self._check_model(asked.model)
        ids = await run_in_threadpool(self._tokens, [self._render(asked.messages)])
        most = asked.max_completion_tokens or asked.max_tokens
        options = asked.options(self.settings.mode, most)
        reply = chat_reply(self.settings.name, self.tokenizer, asked, ids)
        return await self._answer(http, reply, ids, options, asked, {"logprobs": asked.top_logprobs if asked.logprobs else None})

    async def about(self, request: HTTPRequest) -> Response:
        """What answers here: the page's first question."""
        model, states = self._about(), isinstance(self.scheduler.engine, LocalEngine)
        same = {key: model[key] for key in ("chat", "mode", "max_model_len")}
        return JSONResponse({"engine": "fullband", "model": model["id"], **same, "states": states, "task": about_task(self.tokenizer)})

    async def passes(self, http: HTTPRequest) -> Response:
        """A view of the playground (`views.by_passes`)."""
        return await self._view(by_passes, parse(ViewRequest, await self._body(http), "request"))

    async def carried(self, http: HTTPRequest) -> Response:
        """A view of the playground (`views.carried`)."""
        asked = parse(CarriedRequest, await self._body(http), "request")
        prompt = asked.prompt if asked.messages is None else self._render(asked.messages)
        (ids,) = await run_in_threadpool(self._tokens, [prompt])
        answer = self.tokenizer.encode(asked.answer) if isinstance(asked.answer, str) else asked.answer
        return await self._view(carried, ids, answer, asked)

    async def _view(self, view: Callable[..., dict[str, Any]], *asked: Any) -> Response:
        """Of engines that have the model here; one at a time."""
        engine = self.scheduler.engine
        if not isinstance(engine, LocalEngine):
            raise APIError(404, "this server's engine does not give states", "not_found_error")
        async with self._viewing:
            return JSONResponse(await run_in_threadpool(view, engine.model, self.tokenizer, *asked))

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        """A chat as a prompt. Raises ValueError for a model that does not chat."""
        if self.template is None:
            raise ValueError("this model has no chat template: use /v1/completions")
        return self.template.render([Message(role="system" if m.role == "developer" else m.role, content=m.text()) for m in messages])

    async def put_weights(self, http: HTTPRequest) -> Response:
        """Other weights, once the answers that were begun have ended."""
        engine, folder = self.scheduler.engine, self.settings.weights
        if folder is None or not isinstance(engine, LocalEngine):
            raise APIError(403, "this server's weights stay: start it with --allow-weight-updates FOLDER", "permission_error")
        asked = parse(WeightsRequest, await self._body(http), "request")
        async with self._viewing:  # a view evaluates the model in a thread of its own
            try:
                tensors = await run_in_threadpool(replace_weights, self.scheduler, engine, folder, asked.path, self.settings.seconds)
            except ElsewhereError as error:
                raise APIError(403, str(error), "permission_error") from None
            except TimeoutError:
                raise APIError(504, "answers that were begun took longer than this server allows", "timeout_error") from None
            self.updates += 1
        return JSONResponse({"updates": self.updates, "tensors": tensors})

    def _tokens(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Of long texts this takes seconds, so it has no place in the loop."""
        most = LONGEST_TOKEN * self.scheduler.engine.context
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str) and len(prompt) > most:  # before it is tokenised, which takes seconds for megabytes
                context = self.scheduler.engine.context
                raise ValueError(f"prompt {number}: {len(prompt)} characters do not fit the model's context of {context} tokens")
        return [self.tokenizer.begin(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.settings.name):
            raise APIError(404, f"the model '{name}' does not exist; this server has '{self.settings.name}'", "not_found_error")

    async def _body(self, http: HTTPRequest) -> Any:
        """The JSON of a request. Raises APIError for one that is too large, too slow, or no JSON object."""
        limit, content = self.settings.body_bytes, bytearray()
        too_large = APIError(413, f"the request's body must be at most {limit} bytes")
        if int(http.headers.get("content-length") or 0) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self.settings.idle_seconds):
                async for part in http.stream():
                    content += part
                    if len(content) > limit:
                        raise too_large
        except TimeoutError:
            raise APIError(408, "the request's body did not arrive in time") from None
        try:
            body = read_json(bytes(content))
        except (ValueError, RecursionError):
            raise APIError(400, "the request's body is not valid JSON") from None
        if not isinstance(body, dict):
            raise APIError(400, "the request's body must be a JSON object")
        if len(body) > MOST_FIELDS:
            raise APIError(400, f"the request's body must have at most {MOST_FIELDS} fields, got {len(body)}")
        return body

    async def _answer(
        self, http: HTTPRequest, reply: Reply, ids: Sequence[list[int]], options: Any, asked: Any, wants: dict[str, Any]
    ) -> Response:
        """Submit every prompt, then stream the answer, or gather it."""
        until = time.monotonic() + self.settings.seconds
        penalties = {"presence": asked.presence_penalty, "frequency": asked.frequency_penalty}
        self.scheduler.check(ids, options)
        opened: list[_Stream] = []
        try:
            for tokens in ids:
                seeded = options if asked.seed is not None else replace(options, seed=secrets.randbits(63))
                opened.append(_Stream.open(self.scheduler, prompt=tokens, options=seeded, **wants, **penalties))
        except ValueError:
            for stream in opened:
                stream.close()
            raise
        if asked.stream:
            return _Streamed(self._stream(reply, opened, until), opened, until)
        gathering = asyncio.create_task(self._gather(reply, opened, until))
        watching = asyncio.create_task(_gone(http))
        try:
            done, _ = await asyncio.wait({gathering, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # nothing to do for one that is done
            watching.cancel()
            gathering.cancel()
        if gathering not in done:
            raise ClientDisconnect
        return JSONResponse(gathering.result())

    async def _gather(self, reply: Reply, opened: list[_Stream], until: float) -> dict[str, Any]:
        try:
            for number, stream in enumerate(opened):
                async for event in stream.events(until):
                    reply.take(number, event)
        finally:
            for stream in opened:
                stream.close()
        return reply.whole()

    async def _stream(self, reply: Reply, opened: list[_Stream], until: float) -> AsyncIterator[str]:
        """Server-sent events; an error in the middle is the last of them."""
        merged: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()

        async def pump(number: int, stream: _Stream) -> None:
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


def read_json(content: bytes) -> Any:
    """Raises ValueError and RecursionError for what is none, or holds half a surrogate pair, which no tokenizer takes."""
    collects = gc.isenabled()
    gc.disable()  # which looks at millions of lists again and again, seconds long
    try:
        body = json.loads(content.decode("utf-8-sig"))
    finally:
        if collects:
            gc.enable()
    if b"\\u" in content:
        json.dumps(body, ensure_ascii=False).encode()
    return body
