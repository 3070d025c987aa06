"""Events of a scheduler as OpenAI's answers, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from fullband.data.tokenizer import Tokenizer
from fullband.serve.rows import Event, TokenInfo
from fullband.serve.schemas import ChatRequest, CompletionRequest


@dataclass
class _Choice:
    """One sample under way."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    reason: str | None = None


class Kind(Protocol):
    """What differs between completions and chat."""

    prefix: str
    whole: str
    chunk: str

    @property
    def asked(self) -> CompletionRequest | ChatRequest: ...

    def choice(self, index: int, text: str, infos: list[TokenInfo], reason: str | None, streamed: bool, first: bool) -> dict[str, Any]: ...


class Reply:
    """The answer to one request: `n` samples of each prompt, numbered through."""

    def __init__(self, model: str, kind: Kind, prompts: Sequence[list[int]], n: int, usage_in_stream: bool, more: dict[str, Any] = {}):  # noqa: B006
        self.kind, self.prompts, self.n, self._usage_in_stream = kind, prompts, n, usage_in_stream
        self._choices = [_Choice() for _ in range(len(prompts) * n)]
        self._begun: set[int] = set()
        self._cached = [0] * len(prompts)
        self._head = {"id": f"{kind.prefix}-{uuid.uuid4().hex[:24]}", "created": int(time.time()), "model": model} | more

    def take(self, prompt: int, event: Event) -> None:
        """Note an event of prompt number `prompt`."""
        self._cached[prompt] = max(self._cached[prompt], event.cached)
        for index in self._concerned(prompt, event):
            choice = self._choices[index]
            choice.pieces.append(event.text)
            choice.tokens += self._infos(event)
            choice.reason = event.finish_reason or choice.reason

    def whole(self) -> dict[str, Any]:
        choices = [
            self.kind.choice(index, "".join(choice.pieces), choice.tokens, choice.reason, False, True)
            for index, choice in enumerate(self._choices)
        ]
        return self._head | {"object": self.kind.whole, "choices": choices, "usage": self._usage()}

    def chunks(self, prompt: int, event: Event) -> Iterator[dict[str, Any]]:
        """What an event adds, as chunks of a stream."""
        self.take(prompt, event)
        for index in self._concerned(prompt, event):
            infos, first = self._infos(event), index not in self._begun
            if event.text or infos or first or event.finish_reason:
                self._begun.add(index)
                choice = self.kind.choice(index, event.text, infos, event.finish_reason, True, first)
                yield self._head | {"object": self.kind.chunk, "choices": [choice]} | ({"usage": None} if self._usage_in_stream else {})

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        if self._usage_in_stream:
            yield self._head | {"object": self.kind.chunk, "choices": [], "usage": self._usage()}

    def _concerned(self, prompt: int, event: Event) -> range:
        first = prompt * self.n
        return range(first, first + self.n) if event.prompt is not None else range(first + event.row, first + event.row + 1)

    def _infos(self, event: Event) -> list[TokenInfo]:
        if event.prompt is not None:
            return event.prompt
        made = event.token or (event.stop if self.kind.asked.return_token_ids else None)
        return [] if made is None else [made]

    def _usage(self) -> dict[str, Any]:
        read = sum(map(len, self.prompts))
        made = sum(len(choice.tokens) for choice in self._choices)
        if getattr(self.kind, "only_prompt", False):
            made = 0
        elif getattr(self.kind, "echoes_tokens", False):
            made -= read * self.n
        cached = {"cached_tokens": sum(self._cached)}
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made, "prompt_tokens_details": cached}


@dataclass
class _Completions:
    """Of /v1/completions. With `echo` the prompt stands first, with its log-probabilities if they are asked for."""

    tokenizer: Tokenizer
    asked: CompletionRequest
    prompts: Sequence[list[int]]
    prefix: str = "cmpl"
    whole: str = "text_completion"
    chunk: str = "text_completion"
    _told: dict[int, int] = field(default_factory=dict)  # characters of tokens in each choice's chunks so far

    @property
    def only_prompt(self) -> bool:
        return self.asked.max_tokens == 0

    @property
    def echoes_tokens(self) -> bool:
        return self.asked.echo and self.asked.logprobs is not None

    def choice(self, index: int, text: str, infos: list[TokenInfo], reason: str | None, streamed: bool, first: bool) -> dict[str, Any]:
        prompt = self.prompts[index // self.asked.n]
        if self.only_prompt and self.echoes_tokens:
            infos = infos[: len(prompt)] if not streamed or first else []
        if self.asked.echo:
            text = (self.tokenizer.decode(prompt) if first else "") + ("" if self.only_prompt else text)
        logprobs = self._logprobs(infos, index if streamed else None)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self.asked.return_token_ids:
            made = infos[len(prompt) :] if self.echoes_tokens and first else infos
            choice |= {"token_ids": [info.token for info in made], "prompt_token_ids": prompt if first else None}
        return choice

    def _logprobs(self, infos: list[TokenInfo], streamed: int | None) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        words = [word_of(self.tokenizer, info.token) for info in infos]
        begin = self._told.get(streamed, 0) if streamed is not None else 0
        *offsets, end = accumulate(map(len, words), initial=begin)
        if streamed is not None:
            self._told[streamed] = end
        top = [None if info.logprob is None else self._top(info) for info in infos]
        return {"tokens": words, "token_logprobs": [info.logprob for info in infos], "top_logprobs": top, "text_offset": offsets}

    def _top(self, info: TokenInfo) -> dict[str, float | None]:
        """The most likely tokens, and the one that stands there."""
        return {word_of(self.tokenizer, token): value for token, value in [*info.top, (info.token, info.logprob)]}


@dataclass
class _Chat:
    """Of /v1/chat/completions."""

    tokenizer: Tokenizer
    asked: ChatRequest
    prefix: str = "chatcmpl"
    whole: str = "chat.completion"
    chunk: str = "chat.completion.chunk"

    def choice(self, index: int, text: str, infos: list[TokenInfo], reason: str | None, streamed: bool, first: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"content": text}
        if first:
            message = {"role": "assistant", **message}
        logprobs = {"content": [self._token(info) for info in infos]} if self.asked.logprobs else None
        choice: dict[str, Any] = {
            "index": index,
            "delta" if streamed else "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        if self.asked.return_token_ids:
            choice["token_ids"] = [info.token for info in infos]
        return choice

    def _token(self, info: TokenInfo) -> dict[str, Any]:
        top = [self._named(token, value) for token, value in info.top]
        return self._named(info.token, info.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        word = word_of(self.tokenizer, token)
        is_part = word == f"token_id:{token}"  # of a character: its bytes are not known here
        return {"token": word, "logprob": logprob, "bytes": None if is_part else list(word.encode())}


def word_of(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; its id where it is a part of a character: many parts would have one name."""
    text = tokenizer.decode([token])
    return f"token_id:{token}" if "\ufffd" in text or not text else text


def completion_reply(model: str, tokenizer: Tokenizer, asked: CompletionRequest, prompts: Sequence[list[int]]) -> Reply:
    usage = bool(asked.stream_options and asked.stream_options.include_usage)
    return Reply(model, _Completions(tokenizer, asked, prompts), prompts, asked.n, usage)


def chat_reply(model: str, tokenizer: Tokenizer, asked: ChatRequest, prompts: Sequence[list[int]]) -> Reply:
    usage = bool(asked.stream_options and asked.stream_options.include_usage)
    more = {"prompt_token_ids": prompts[0]} if asked.return_token_ids and not asked.stream else {}  # not in every chunk
    return Reply(model, _Chat(tokenizer, asked), prompts, asked.n, usage, more)
