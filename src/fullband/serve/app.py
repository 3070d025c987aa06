"""The ASGI application: OpenAI's API over a `Scheduler`, with a key, limits and metrics. Errors are OpenAI's, in one line."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fullband.data.chat_template import ChatTemplate, Message
from fullband.data.tokenizer import Tokenizer
from fullband.serve.answers import respond, unless_gone
from fullband.serve.bodies import read_body
from fullband.serve.engine import LocalEngine
from fullband.serve.errors import APIError
from fullband.serve.metrics import Metrics
from fullband.serve.page import playground
from fullband.serve.replies import chat_reply, completion_reply
from fullband.serve.scheduler import FullError, Scheduler
from fullband.serve.schemas import ChatMessage, ChatRequest, CompletionRequest
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
        self._views_waiting = 0
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
        return await respond(http, self.scheduler, reply, ids, options, asked, wants, self.settings.seconds)

    async def chat(self, http: HTTPRequest) -> Response:
        asked = parse(ChatRequest, await self._body(http), "request")
        self._check_model(asked.model)
        ids = await run_in_threadpool(self._tokens, [self._render(asked.messages)])
        most = asked.max_completion_tokens or asked.max_tokens
        options = asked.options(self.settings.mode, most)
        reply = chat_reply(self.settings.name, self.tokenizer, asked, ids)
        wants = {"logprobs": asked.top_logprobs if asked.logprobs else None}
        return await respond(http, self.scheduler, reply, ids, options, asked, wants, self.settings.seconds)

    async def about(self, request: HTTPRequest) -> Response:
        """What answers here: the page's first question."""
        model, states = self._about(), isinstance(self.scheduler.engine, LocalEngine)
        same = {key: model[key] for key in ("chat", "mode", "max_model_len")}
        return JSONResponse({"engine": "fullband", "model": model["id"], **same, "states": states, "task": about_task(self.tokenizer)})

    async def passes(self, http: HTTPRequest) -> Response:
        """A view of the playground (`views.by_passes`)."""
        asked = parse(ViewRequest, await self._body(http), "request")
        self._check_characters("text", asked.text)
        return await self._view(http, by_passes, asked)

    async def carried(self, http: HTTPRequest) -> Response:
        """A view of the playground (`views.carried`)."""
        asked = parse(CarriedRequest, await self._body(http), "request")
        prompt = asked.prompt if asked.messages is None else self._render(asked.messages)
        (ids,) = await run_in_threadpool(self._tokens, [prompt])
        answer = asked.answer
        if isinstance(answer, str):
            self._check_characters("answer", answer)
            answer = await run_in_threadpool(self.tokenizer.encode, answer)
        return await self._view(http, carried, ids, answer, asked)

    async def _view(self, http: HTTPRequest, view: Callable[..., dict[str, Any]], *asked: Any) -> Response:
        """Of engines that have the model here; one at a time. Whoever goes away gives up its place, until its view has begun."""
        engine = self.scheduler.engine
        if not isinstance(engine, LocalEngine):
            raise APIError(404, "this server's engine does not give states", "not_found_error")
        if self._views_waiting >= self.scheduler.most_waiting:
            raise FullError(f"{self._views_waiting} views are waiting already")
        self._views_waiting += 1
        try:
            await unless_gone(http, self._turn_to_view())
        finally:
            self._views_waiting -= 1
        try:
            return JSONResponse(await run_in_threadpool(view, engine.model, self.tokenizer, *asked))
        finally:
            self._viewing.release()

    async def _turn_to_view(self) -> None:
        """Raises APIError where it does not come in time."""
        try:
            async with asyncio.timeout(self.settings.seconds):
                await self._viewing.acquire()
        except TimeoutError:
            raise APIError(504, "the views before this one took longer than this server allows", "timeout_error") from None

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
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                self._check_characters(f"prompt {number}", prompt)
        return [self.tokenizer.begin(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _check_characters(self, name: str, text: str) -> None:
        """Raises ValueError for what can't fit, before it is tokenised, which takes seconds for megabytes."""
        context = self.scheduler.engine.context
        if len(text) > LONGEST_TOKEN * context:
            raise ValueError(f"{name}: {len(text)} characters do not fit the model's context of {context} tokens")

    async def _body(self, http: HTTPRequest) -> dict[str, Any]:
        return await read_body(http, self.settings.body_bytes, self.settings.idle_seconds)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.settings.name):
            raise APIError(404, f"the model '{name}' does not exist; this server has '{self.settings.name}'", "not_found_error")
