"""OpenAI's requests as far as they are served: unknown and unsupported fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from fullband.decode.options import MOST_TOKENS, GenerateOptions
from fullband.feedback_config import FeedbackPasses
from fullband.strict import Strict

MOST_STOPS, MOST_LOGPROBS, MOST_PASSES = 16, 20, 64
MOST_PROMPTS, MOST_MESSAGES, MOST_FIELDS = 2**16, 4096, 128  # more are a slip, or meant to keep the server from answering others
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _few_passes(passes: FeedbackPasses) -> FeedbackPasses:
    if isinstance(passes, int) and passes > MOST_PASSES:
        raise ValueError(f"must be at most {MOST_PASSES}, or 'exact' or 'converged'")
    return passes


FewPasses = Annotated[FeedbackPasses, AfterValidator(_few_passes)]


def _prompts(given: Any) -> list[str | list[int]]:
    """A text, several, ids, or several lists of ids. By types alone: to say what is wrong with each of a million takes seconds."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given)) if isinstance(given, list) else set()
    if kinds == {int}:
        return [given]
    if given == []:
        raise ValueError("must not be an empty list")
    if kinds in ({str}, {list}) and len(given) > MOST_PROMPTS:
        raise ValueError(f"must be at most {MOST_PROMPTS} prompts, got {len(given)}")
    if kinds == {str} or (kinds == {list} and all({int}.issuperset(map(type, ids)) for ids in given)):
        return list(given)
    raise ValueError("must be a text, several texts, token ids, or several lists of token ids")


Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(fail_fast=True)]


class _Within(Strict):
    """A section of a request. What is null or an empty list is as if it were not there."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        if len(raw) > MOST_FIELDS:
            raise ValueError(f"must have at most {MOST_FIELDS} fields, got {len(raw)}")
        return {name: value for name, value in raw.items() if value is not None and value != []}


IGNORED = (  # of OpenAI's fields: what does not change an answer here
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction"),
    "parallel_tool_calls",
)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # and the values that ask for nothing
    "best_of": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(_Within):
    include_usage: bool = False
    include_obfuscation: bool = False  # random padding, which is never sent


class _Sampling(Strict):
    """What both kinds of requests have in common; the last fields are ours."""

    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)  # None = other draws for every prompt
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    return_token_ids: bool = False
    mode: Literal["standard", "soft", "fused"] | None = None
    feedback_passes: FewPasses | None = None
    top_k: int | None = Field(default=None, ge=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    min_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)

    @model_validator(mode="before")
    @classmethod
    def _name_what_is_unsupported(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        for name, nothing in UNSUPPORTED.items():
            if raw.get(name) is not None and raw[name] not in nothing:
                raise ValueError(f"{name} is not supported by this server")
        return {name: value for name, value in raw.items() if value is not None and name not in (*IGNORED, *UNSUPPORTED)}

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream: true")
        return self

    def options(self, default_mode: str, most: int | None) -> GenerateOptions:
        """Raises ValueError for what doesn't go together."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        mode = self.mode or ("fused" if self.feedback_passes not in (None, 0) else default_mode)
        return GenerateOptions(
            mode=mode,
            feedback_passes=self.feedback_passes,
            stop=stops,
            max_new_tokens=most,
            min_new_tokens=self.min_tokens,
            n=self.n,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=(self.seed or 0) % 2**63,
        )


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    max_tokens: int = Field(default=16, ge=0, le=MOST_TOKENS)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False


class ChatMessage(_Within):
    """`developer` is `system` by its newer name; `name` is ignored, as are fields that clients send back empty from an earlier answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_MESSAGES)]
    name: str | None = None

    def text(self) -> str:
        """Raises ValueError for parts that are no text."""
        if isinstance(self.content, str):
            return self.content
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in self.content):
            raise ValueError("messages: content must be text")
        return "".join(part["text"] for part in self.content)


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens: are two names of one limit, got two values")
        return self
