"""OpenAI's requests as far as they are served: unknown and unsupported fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fullband.decode.options import MOST_TOKENS, GenerateOptions
from fullband.feedback_config import FeedbackPasses
from fullband.strict import Strict

MOST_STOPS, MOST_LOGPROBS = 16, 20
Penalty = Annotated[float, Field(ge=-2, le=2)]
Id = Annotated[int, Field(ge=0, le=2**31)]
UNSUPPORTED = ("best_of", "logit_bias", "suffix", "tools", "tool_choice", "functions", "function_call", "response_format", "audio")


class StreamOptions(Strict):
    include_usage: bool = False


class _Sampling(Strict):
    """What both kinds of requests have in common; the last fields are ours."""

    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)  # None = other draws for every prompt
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    user: str | None = None
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
        for name in UNSUPPORTED:
            if raw.get(name) is not None:
                raise ValueError(f"{name} is not supported by this server")
        return {name: value for name, value in raw.items() if name not in UNSUPPORTED and value is not None}

    def options(self, default_mode: str, most: int | None, context: int) -> GenerateOptions:
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
            max_length=None if most is not None else context,
            min_new_tokens=self.min_tokens,
            n=self.n,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed or 0,
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
    role: str
    content: str | list[dict[str, Any]]
    name: str | None = None

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
