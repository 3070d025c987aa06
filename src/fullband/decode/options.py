"""What can be asked of generation: one object from the command line to the token loop, checked in one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, TypedDict, get_args

from fullband.decode.modes import Mode, resolve_mode
from fullband.decode.sampling import LogitProcessor, SamplingOptions, check
from fullband.decode.speculate import Speculation
from fullband.feedback_config import FeedbackPasses
from fullband.trunk.protocol import Trunk

Overflow = Literal["refuse", "slide"]


class Cancellation(Protocol):
    """A threading.Event, or anything like it."""

    def is_set(self) -> bool: ...


class GenerateSettings(TypedDict, total=False):
    """The keywords of `generate`, `generate_texts` and the others; `GenerateOptions` says what they mean."""

    stop: str | Sequence[str]
    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int
    stop_ids: Collection[int] | None
    n: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    keys: Sequence[int] | None
    processors: Sequence[LogitProcessor]
    overflow: Overflow
    cancelled: Callable[[], bool] | Cancellation | None
    chunk: int | None
    speculation: Speculation | None
    static: bool
    compile: bool


MOST_SAMPLES, MOST_TOKENS = 2**16, 10**9  # above which a number is a slip


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingOptions):
    """Sampling, and what else can be asked. A row is one sample of one prompt: sample s of prompt i is row i·n + s.

    mode, feedback_passes  as in `resolve_mode`
    stop            strings that end a row's text where they begin. They are looked for in the text made by the row, across tokens; the one
                    that is complete first counts. For texts: `stream_texts`, `generate_texts`, `generate_text`
    max_new_tokens  tokens a row makes at most; None = as many as `max_length` or the context leave room for
    max_length      tokens a row has at most, prompt included; None = no such limit
    stop_ids        end a row; they are not among its tokens. None = none, and for texts the tokenizer's own
    n               samples of each prompt, which is prefilled once
    keys            an integer ≥ 0 for each prompt, on which its draws depend, with the seed and the number of the sample, and on nothing
                    else; None = the prompts' numbers 0, 1, 2, …. A prompt that keeps its key keeps its text, in any batch and any order
    overflow        what happens to a row that outgrows the context: "refuse" says so before anything is computed. "slide" forgets: when
                    a row has filled the context and makes a token more, the last half context of its text, that token included, is
                    prefilled as a new prompt by the rule of the mode (law 6: without feedback in Standard and Soft, in fused passes in
                    Fused), its positions counted from 0, and the row goes on from there. A prompt longer than the context is cut alike.
                    Tokens that were forgotten still count for the repetition penalty, unless they were cut from the prompt
    cancelled       asked before every step (a function, or an event that may be set): True ends every row with what it has
    chunk           positions of a prompt that are run at a time; None = all. The result does not depend on it
    speculation     draft by looking back and check drafts in parallel passes (`Speculation`); rows are then run one by one.
                    None = a step a token
    static          decode in buffers of fixed size (`decode.static`), where finished rows stay until all have finished. By itself no
                    faster on a CPU; what `compile` needs. For the built-in decoder; neither with overflow="slide" nor with speculation
    compile         `static`, and compile the step: seconds to minutes at the first use of a number of rows and a length (both rounded up to
                    powers of two), then faster (results/benchmarks says how much). Needs a C++ compiler on the CPU

    Raises ValueError for values that mean nothing or contradict each other.
    """

    mode: str = "soft"
    feedback_passes: FeedbackPasses | None = None
    stop: str | Sequence[str] = ()
    max_new_tokens: int | None = None
    max_length: int | None = None
    stop_ids: Collection[int] | None = None
    n: int = 1
    keys: Sequence[int] | None = None
    overflow: Overflow = "refuse"
    cancelled: Callable[[], bool] | Cancellation | None = None
    chunk: int | None = None
    speculation: Speculation | None = None
    static: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_mode(self.mode, self.feedback_passes)
        most, length, known = self.max_new_tokens, self.max_length, get_args(Overflow)
        slides, fixed = self.overflow == "slide", self.in_fixed_buffers
        endless = slides and most is None and length is None
        least_key = min(() if self.keys is None else self.keys, default=0)
        how = f"{'compile' if self.compile else 'static'} decodes in fixed buffers"
        check(
            ("" not in self.stop_strings, "a stop string must have at least one character"),
            (most is None or 1 <= most <= MOST_TOKENS, f"max_new_tokens must be 1 to {MOST_TOKENS}, got {most}"),
            (length is None or length >= 2, f"max_length counts the prompt and at least one new token; it is not {length}"),
            (1 <= self.n <= MOST_SAMPLES, f"n, the samples of each prompt, must be 1 to {MOST_SAMPLES}, got {self.n}"),
            (least_key >= 0, f"keys are integers ≥ 0, not {least_key}"),
            (self.overflow in known, f"unknown overflow '{self.overflow}' (known: {', '.join(known)})"),
            (not endless, "a text that slides has no end of its own: give max_new_tokens or max_length"),
            (not (fixed and slides), f"{how}, which overflow='slide' cannot use: leave out one of the two"),
            (not (fixed and self.speculation), f"{how}, which speculation cannot use: leave out one of the two"),
        )

    @property
    def resolved_mode(self) -> Mode:
        return resolve_mode(self.mode, self.feedback_passes)

    def in_mode(self, mode: Mode) -> Self:
        return replace(self, mode=mode.name, feedback_passes=mode.feedback_passes)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def cut_to(self, context: int) -> int | None:
        """The last tokens that are left of a prompt longer than the context; None = such a prompt is refused."""
        return kept_of(context) if self.overflow == "slide" else None

    @property
    def in_fixed_buffers(self) -> bool:
        return self.static or self.compile

    def is_cancelled(self) -> bool:
        if self.cancelled is None:
            return False
        return self.cancelled() if callable(self.cancelled) else self.cancelled.is_set()

    def row_keys(self, prompts: int) -> list[tuple[int, int]]:
        """(key of the prompt, number of the sample) of every row. Raises ValueError if there are not as many keys as prompts."""
        keys = range(prompts) if self.keys is None else self.keys
        if len(keys) != prompts:
            raise ValueError(f"{len(keys)} keys for {prompts} prompts; each prompt has its own")
        return [(key, sample) for key in keys for sample in range(self.n)]

    def stops(self, vocab_size: int) -> list[int]:
        """The stop ids in order. Raises ValueError if one is outside the vocabulary."""
        stops = sorted(set(self.stop_ids or ()))
        for token in stops:
            if not 0 <= token < vocab_size:
                raise ValueError(f"stop id {token} is outside 0..{vocab_size - 1}")
        return stops

    def limits(self, lengths: Sequence[int], trunk: Trunk) -> list[int]:
        """The most tokens each prompt, with that many tokens, is continued by. Raises ValueError, naming the prompt, if one has no room."""
        return [self._limit(number, length, trunk) for number, length in enumerate(lengths)]

    def _limit(self, number: int, length: int, trunk: Trunk) -> int:
        context = trunk.context
        asked = [] if self.max_new_tokens is None else [(self.max_new_tokens, f"max_new_tokens={self.max_new_tokens}")]
        if self.max_length is not None:
            asked.append((self.max_length - length, f"max_length={self.max_length}"))
        limit, reason = min(asked) if asked else (max(1, context - length), "at least one new token")
        if limit < 1:
            raise ValueError(f"prompt {number} has {length} tokens; {reason} leaves no room for a new one")
        if self.overflow == "refuse" and length + limit > context:
            room = context - length
            raise ValueError(
                f"prompt {number} has {length} tokens; with {reason} it exceeds the model's context of {context} (room for {room})"
                f"{trunk.context_note}"
            )
        if self.min_new_tokens > limit:
            raise ValueError(f"prompt {number} makes at most {limit} tokens, fewer than min_new_tokens={self.min_new_tokens}")
        return limit


def kept_of(context: int) -> int:
    """The tokens that a text keeps when it slides: half the context."""
    return max(1, context // 2)
