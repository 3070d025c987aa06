"""The running batch: requests wait, are prefilled, join, make a token a step together, and leave. One thread does all of it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullband.data.tokenizer import Tokenizer
from fullband.decode.modes import Mode, resolve_mode
from fullband.decode.options import GenerateOptions
from fullband.decode.sampling import precise
from fullband.serve.engine import Engine, Prefill
from fullband.serve.rows import Event, Request, Row, TokenInfo, describe

PATIENCE = 8  # parts of a prompt that later requests wait for, before they are prefilled beside it
PREFILL_TOKENS = 512  # of prompts in a step, about: what others wait for between two of their tokens


@dataclass
class _Group:
    """Rows that all feed back, or all do not, with one state."""

    mode: Mode
    rows: list[Row] = field(default_factory=list)
    state: Any = None


@dataclass(eq=False)
class _Entering:
    """Requests whose prompts are being prefilled together; `ran` parts so far. Those in `gone` were cancelled: they don't join."""

    requests: list[Request]
    parts: Iterator[Prefill | None]
    ran: int = 0
    gone: set[Request] = field(default_factory=set)

    @property
    def left(self) -> list[Request]:
        return [request for request in self.requests if request not in self.gone]


@dataclass
class Counters:
    """What `/metrics` tells."""

    requests: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    prefix_hits: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0


class FullError(ValueError):
    """More requests wait than may."""


class Scheduler:
    """Runs requests on an engine in a thread of its own."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, most_rows: int = 16, most_waiting: int = 256, device: Any = "cpu"):
        """`most_rows`: sequences in the running batch; `most_waiting`: requests that may wait for a place."""
        self.prefill_tokens = PREFILL_TOKENS
        self.engine, self.tokenizer, self.device = engine, tokenizer, device
        self.most_rows, self.most_waiting = most_rows, most_waiting
        self.counters = Counters()
        self._stops = [token for token in tokenizer.stops if token < engine.vocab_size]
        self._waiting: deque[Request] = deque()
        self._cancelled: set[Request] = set()
        self._changes: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._groups = {True: _Group(resolve_mode("soft")), False: _Group(resolve_mode("standard"))}
        self._entering: deque[_Entering] = deque()  # whose turn it is first
        self._wake, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="fullband-scheduler", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return sum(len(group.rows) for group in self._groups.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def check(self, prompts: Sequence[Sequence[int]], options: GenerateOptions) -> None:
        """Raises ValueError for prompts that can't be served, before they wait; it names the first one, counted from 0."""
        if options.n > self.most_rows:
            raise ValueError(f"n must be at most {self.most_rows}, got {options.n}")
        try:
            options.limits([len(prompt) for prompt in prompts], self._limits_of)
        except ValueError as error:
            raise ValueError(str(error).replace("_new_tokens", "_tokens")) from None  # as the API names them
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {number} must have at least one token")
            for place, token in enumerate(prompt):
                if not 0 <= token < self.engine.vocab_size:
                    raise ValueError(f"prompt {number}: token id {token} at position {place} is outside 0 to {self.engine.vocab_size - 1}")

    def submit(self, request: Request) -> None:
        """Queue a request. Raises FullError where too many wait, ValueError as `check`."""
        self.check([request.prompt], request.options)
        with self._wake:
            if self._closed:
                raise FullError("the server is shutting down")
            if len(self._waiting) >= self.most_waiting:
                raise FullError(f"{len(self._waiting)} requests are waiting already")
            self._waiting.append(request)
            self.counters.requests += 1
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """The request's rows leave before the next step; it hears no more."""
        with self._wake:
            self._cancelled.add(request)
            self._wake.notify()

    def change(self, work: Callable[[], None]) -> Future[None]:
        """Run `work`, which changes the engine, in the scheduler's thread: requests that were begun end first, the others wait for it.
        Raises FullError where the server is shutting down."""
        done: Future[None] = Future()
        with self._wake:
            if self._closed:
                raise FullError("the server is shutting down")
            self._changes.append((work, done))
            self._wake.notify()
        return done

    def close(self, timeout: float | None = None) -> None:
        """Refuse new requests, finish those that were taken, stop. After `timeout` seconds what is left is dropped."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)

    @property
    def _limits_of(self) -> Any:
        return _Limits(self.engine.context)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._entering or self.running or self._changes or self._closed):
                    self._cancelled.clear()
                    self._wake.wait()
                if self._closed and not (self._waiting or self._entering or self.running or self._changes):
                    return
                gone, self._cancelled = self._cancelled, set()
            self._drop(gone)
            if self._changes and not (self._entering or self.running):
                self._change()
            self._admit()
            for group in self._groups.values():
                if group.rows:
                    try:
                        self._step(group)
                    except Exception as error:  # of the engine, and so of all its sequences
                        rows, group.rows, group.state = group.rows, [], None
                        for row in rows:
                            self._emit(row.request, Event(row.number, error=_words(error)))

    def _change(self) -> None:
        work, done = self._changes.popleft()
        if done.set_running_or_notify_cancel():
            try:
                work()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

    def _emit(self, request: Request, event: Event) -> None:
        """Whoever can't hear any more has left."""
        try:
            request.emit(event)
        except Exception:
            self.cancel(request)

    def _drop(self, gone: set[Request]) -> None:
        """Take cancelled requests out of everywhere."""
        if not gone:
            return
        with self._wake:
            before = len(self._waiting)
            self._waiting = deque(request for request in self._waiting if request not in gone)
            self.counters.cancelled += before - len(self._waiting)
        for entering in [entering for entering in self._entering if gone.intersection(entering.requests)]:
            before = len(entering.left)
            entering.gone |= gone
            self.counters.cancelled += before - len(entering.left)
            if not entering.left:
                self._entering.remove(entering)
        for group in self._groups.values():
            self.counters.cancelled += len(gone.intersection(row.request for row in group.rows))
            kept = [place for place, row in enumerate(group.rows) if row.request not in gone]
            if len(kept) < len(group.rows):
                self._keep(group, kept)

    def _admit(self) -> None:
        """Prefill what waits, as far as places and this step's share of positions go. Prompts of one mode are run together; those that take
        long take turns with later ones."""
        budget = self.prefill_tokens
        while budget > 0:
            if all(entering.ran >= PATIENCE for entering in self._entering):
                self._call_in(budget)
            if not self._entering:
                return
            entering = self._entering.popleft()
            requests = entering.requests
            try:
                done = next(entering.parts)
                if done is not None:
                    self._enter(entering, done)
                else:
                    entering.ran += 1
                    self._entering.append(entering)
            except Exception as error:
                for request in entering.left:
                    self._emit(request, Event(0, error=_words(error)))
            budget -= max(len(request.prompt) for request in requests) * len(requests)

    def _call_in(self, budget: int) -> None:
        """Begin to prefill the first requests that wait, of one mode, as many as fit."""
        coming = sum(request.options.n for entering in self._entering for request in entering.left)
        places, called = self.most_rows - self.running - coming, list[Request]()
        with self._wake:
            while self._waiting and not self._changes:
                request = self._waiting[0]
                places -= request.options.n
                longest = max(len(other.prompt) for other in (*called, request))
                if places < 0 or (called and (_kind(request) != _kind(called[0]) or longest * (len(called) + 1) > budget)):
                    break
                called.append(self._waiting.popleft())
        if called:
            first = called[0]
            prompts = [request.prompt for request in called]
            parts = self.engine.prefill(prompts, first.options.resolved_mode, first.prompt_logprobs)
            self._entering.appendleft(_Entering(called, parts))

    def _enter(self, entering: _Entering, done: Prefill) -> None:
        """Prefilled requests join the running batch, each with its samples."""
        engine, group = self.engine, self._groups[entering.requests[0].options.resolved_mode.feeds_back]
        requests = [(number, request) for number, request in enumerate(entering.requests) if request not in entering.gone]
        state, kept = done.state, [number for number, request in requests for _ in range(request.options.n)]
        if kept != list(range(len(entering.requests))):
            state = engine.release(state, kept)
        joined = state if group.state is None else engine.join([group.state, state])
        rows = [row for number, request in requests for row in self._rows_of(request, done.cached[number])]
        for number, request in requests:
            self.counters.prompt_tokens += len(request.prompt)
            self.counters.prefix_hits += done.cached[number] > 0
            self.counters.cached_tokens += done.cached[number]
            if done.states is not None:
                self._emit(request, Event(0, prompt=self._prompt_logprobs(request, done.states[number])))
        group.state, group.rows = joined, group.rows + rows

    def _rows_of(self, request: Request, cached: int) -> list[Row]:
        options, vocab_size = request.options, self.engine.vocab_size
        (limit,) = options.limits([len(request.prompt)], self._limits_of)
        stops = self._stops if options.stop_ids is None else list(options.stop_ids)
        return [Row(request, number, limit, self.tokenizer, stops, vocab_size, self.device, cached) for number in range(options.n)]

    def _prompt_logprobs(self, request: Request, states_TD: Tensor) -> list[TokenInfo]:
        """The first token has none: nothing comes before it."""
        found = [TokenInfo(request.prompt[0], None)]
        for start in range(0, len(request.prompt) - 1, 256):
            logits = precise(self.engine.head(states_TD[start : min(start + 256, len(request.prompt) - 1)]))
            for row, token in zip(logits, request.prompt[start + 1 :], strict=False):
                found.append(describe(row, token, request.logprobs or 0))
        return found

    def _step(self, group: _Group) -> None:
        """A token for every row; those that have ended leave, the others run theirs."""
        logits_NV = self.engine.head(self.engine.top(group.state))
        best = logits_NV.max(dim=-1)
        greedy, finite = best.indices.tolist(), best.values.isfinite().tolist()
        tokens: list[int] = []
        kept: list[int] = []
        for place, row in enumerate(group.rows):
            try:
                info = TokenInfo(greedy[place], None) if row.is_plain and finite[place] else row.choose(logits_NV[place : place + 1])
                event = row.take(info)
            except Exception as error:
                self._emit(row.request, Event(row.number, error=_words(error)))
                continue
            self.counters.new_tokens += 1
            self._emit(row.request, event)
            if event.finish_reason is None:
                kept.append(place)
                tokens.append(info.token)
        self.counters.steps += 1
        self._keep(group, kept)
        if group.rows:
            group.state = self.engine.step(group.state, torch.tensor(tokens), group.mode)

    def _keep(self, group: _Group, kept: list[int]) -> None:
        if len(kept) < len(group.rows):
            group.state = self.engine.release(group.state, kept)
            group.rows = [group.rows[place] for place in kept]


def _kind(request: Request) -> tuple[Mode, bool]:
    """What prompts must have in common to be prefilled together."""
    return request.options.resolved_mode, request.prompt_logprobs


@dataclass(frozen=True)
class _Limits:
    """What `GenerateOptions.limits` asks of a trunk."""

    context: int
    context_note: str = ""


def _words(error: Exception) -> str:
    """What the client is told; the log has the rest."""
    if isinstance(error, ValueError):
        return str(error)
    logging.getLogger("fullband.serve").error("a request ended", exc_info=error)
    return f"{type(error).__name__} in the model; the server's log has more"
