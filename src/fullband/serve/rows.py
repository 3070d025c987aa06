"""What is asked of the scheduler, what it answers, and a row of its batch: one sample of one request, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullband.data.tokenizer import Tokenizer
from fullband.decode.options import GenerateOptions
from fullband.decode.sampling import Sampler, penalize_repetition, precise
from fullband.decode.texts import RowText


@dataclass(frozen=True)
class TokenInfo:
    """A token with its log-probability before temperature and filters, and the most likely ones beside it."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """What happened to one row of a request: text that became whole, the token that was made, and why the row ended, if it did.

    row       number of the sample
    token     none for a stop id, which is not among the tokens
    prompt    of the first event of a request that asked for them: the prompt's own tokens with their log-probabilities
    error     why the request ended without an answer
    cached    tokens of the prompt that were not run again
    stop      the stop id that ended the row
    """

    row: int
    text: str = ""
    token: TokenInfo | None = None
    finish_reason: str | None = None
    prompt: list[TokenInfo] | None = None
    error: str | None = None
    cached: int = 0
    stop: TokenInfo | None = None


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to be continued. `emit` gets its events, from the scheduler's thread.

    logprobs            most likely tokens to report beside each new one; None = no log-probabilities
    prompt_logprobs     whether those of the prompt's tokens are wanted too
    presence, frequency penalties of OpenAI's API, on the tokens that a row has made
    """

    prompt: list[int]
    options: GenerateOptions
    emit: Callable[[Event], None]
    logprobs: int | None = None
    prompt_logprobs: bool = False
    presence: float = 0.0
    frequency: float = 0.0


class Row:
    """One sample of a request."""

    def __init__(
        self, request: Request, number: int, limit: int, tokenizer: Tokenizer, stops: list[int], vocab_size: int, device: Any, cached: int
    ):
        options = request.options
        self.request, self.number, self.left, self.made, self.cached = request, number, limit, 0, cached
        self.text = RowText(tokenizer, request.prompt, options.stop_strings, options.min_new_tokens)
        self.stops = stops
        self.sampler = Sampler(options, [(0, number)], limit, device, stops)
        self.seen_V: Tensor | None = None
        if options.repetition_penalty != 1:
            self.seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen_V[torch.tensor(request.prompt, device=device)] = True
        self.counts_V: Tensor | None = None
        if request.presence or request.frequency:
            self.counts_V = torch.zeros(vocab_size, device=device)

    @property
    def is_plain(self) -> bool:
        """Whether the most likely token is all that is asked for."""
        options = self.request.options
        asks = options.temperature or self.request.logprobs is not None or self.counts_V is not None or self.seen_V is not None
        return not asks and self.made >= options.min_new_tokens

    def choose(self, logits_1V: Tensor) -> TokenInfo:
        """Raises ValueError where nothing can be chosen."""
        options, logprobs = self.request.options, self.request.logprobs
        adjusted = logits_1V
        if self.seen_V is not None:
            adjusted = penalize_repetition(precise(adjusted), self.seen_V[None], options.repetition_penalty)
        if self.counts_V is not None:
            adjusted = adjusted - self.request.frequency * self.counts_V - self.request.presence * (self.counts_V > 0)
        token = int(self.sampler(adjusted, torch.zeros(1, dtype=torch.long), self.made))
        if token < 0:
            raise ValueError("the model's logits leave no token to choose")
        return TokenInfo(token, None) if logprobs is None else describe(precise(logits_1V)[0], token, logprobs)

    def take(self, info: TokenInfo) -> Event:
        """The event of a new token; whether the row has ended is in it."""
        token = info.token
        self.made, self.left = self.made + 1, self.left - 1
        for counted in (self.seen_V, self.counts_V):
            if counted is not None:
                counted[token] = True if counted.dtype == torch.bool else counted[token] + 1
        if token in self.stops:
            return Event(self.number, self.text.finish(), finish_reason="stop", stop=info, cached=self.cached)
        piece, reason = self.text.take(token, None if self.left else "length")
        return Event(self.number, piece, info, reason, cached=self.cached)


def describe(logits_V: Tensor, token: int, most: int) -> TokenInfo:
    """Log-probabilities of the token and of the `most` most likely ones."""
    log_V = logits_V.log_softmax(-1)
    values, ids = log_V.topk(min(most, len(log_V))) if most else (log_V[:0], log_V[:0].long())
    return TokenInfo(token, float(log_V[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))
