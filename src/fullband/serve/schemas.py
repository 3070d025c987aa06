"""OpenAI's requests as far as they are served: unknown and unsupported fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fullband.decode.options import MOST_TOKENS, GenerateOptions
from fullband.feedback_config import FeedbackPasses
from fullband.strict import Strict

MOST_STOPS, MOST_LOGPROBS = 16, 20
Penalty = Annotated[float, Field(ge=-2, le=2)]
Id = Annotated[int, Field(ge=0, le=2**31)]
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


class StreamOptions(Strict):
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
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)  # None = other draws for every prompt
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    return_token_ids: bool = False
    mode: Literal["standard", "soft", "fused"] | None = None
    feedback_passes: FeedbackPasses | None = None
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
        if len(stops) > MOST_STOPS:
            raise ValueError(f"stop must have at most {MOST_STOPS} strings, got {len(stops)}")
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
    """POST /v1/completions. `prompt` is a text, several, or ids."""

    prompt: str | list[str] | list[Id] | list[list[Id]]
    max_tokens: int = Field(default=16, ge=0, le=MOST_TOKENS)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False

    def prompts(self) -> list[str | list[int]]:
        """Raises ValueError if there is none."""
        if self.prompt == []:
            raise ValueError("prompt: must not be an empty list")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # all are, then
        return list(self.prompt)  # type: ignore[arg-type]


class ChatMessage(Strict):
    """`developer` is `system` by its newer name; `name` is ignored, as are fields that clients send back empty from an earlier answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_is_empty(cls, raw: Any) -> Any:
        return {name: value for name, value in raw.items() if value not in (None, [])} if isinstance(raw, dict) else raw

    def text(self) -> str:
        """Raises ValueError for parts that are no text."""
        if isinstance(self.content, str):
            return self.content
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in self.content):
            raise ValueError("messages: content must be text")
        return "".join(part["text"] for part in self.content)


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
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
