"""The three modes side by side: the same prompts continued in each, where the answers part, and what each took (Fig. 8, App. G)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Unpack

from fullband.data.tokenizer import Tokenizer
from fullband.decode.generate import NewText, stream_texts
from fullband.decode.modes import Mode, ModeName, resolve_mode
from fullband.decode.options import Settings
from fullband.decode.rows import kept_of
from fullband.decode.steps import FinishReason, stream
from fullband.feedback.passes import FeedbackModel
from fullband.feedback_config import FeedbackPasses

MODES: tuple[ModeName, ...] = ("standard", "soft", "fused")
WARM_UP = 8  # tokens of the first prompt, read before the clock starts


@dataclass(frozen=True)
class Answer:
    """The new tokens of one prompt, the characters that became whole with each, and why it ended."""

    tokens: list[int]
    pieces: list[str]
    finish_reason: FinishReason

    @cached_property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class ModeAnswers:
    """What one mode did with all prompts.

    first_token_seconds  reading the prompts and choosing their first tokens
    seconds              everything; batches one after the other
    steps                steps of decoding behind the first tokens: a step makes a token of every row of a batch
    """

    mode: Mode
    answers: list[Answer]
    first_token_seconds: float
    seconds: float
    steps: int

    def to_json(self) -> dict[str, Any]:
        """Sums and medians over the prompts."""
        tokens = [len(answer.tokens) for answer in self.answers]
        return {
            "feedback_passes": self.mode.feedback_passes,
            "tokens_median": median(tokens),
            "tokens": sum(tokens),
            "ended_by_themselves": sum(answer.finish_reason == "stop" for answer in self.answers) / len(tokens),
            "first_token_seconds": self.first_token_seconds,
            "seconds": self.seconds,
            "seconds_per_step": (self.seconds - self.first_token_seconds) / self.steps if self.steps else None,
        }


@dataclass(frozen=True)
class Comparison:
    """prompts, the tokens of each that were read, and the answers by mode, in the order of `MODES`."""

    prompts: list[str]
    prompt_tokens: list[int]
    by_mode: dict[ModeName, ModeAnswers]

    def first_difference(self, prompt: int, mode: ModeName) -> int | None:
        """The first token, counted from 0, that is not Standard's, be it because one of the two has ended; None = all are equal."""
        ours, theirs = self.by_mode[mode].answers[prompt].tokens, self.by_mode["standard"].answers[prompt].tokens
        if ours == theirs:
            return None
        return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))

    def parting(self, prompt: int) -> int | None:
        """Where the first of the other modes leaves Standard."""
        return min((place for mode in self.by_mode if (place := self.first_difference(prompt, mode)) is not None), default=None)

    def positions_read(self, mode: ModeName) -> int | None:
        """Positions the trunk computed to read the prompts: tokens x passes. None for "converged", where that depends on the text."""
        passes = self.by_mode[mode].mode.feedback_passes
        if passes == "converged":
            return None
        return sum(self.prompt_tokens) * (1 if passes == "exact" else 1 + passes)

    def summary(self) -> dict[ModeName, dict[str, Any]]:
        """By mode: `ModeAnswers.to_json`, positions read, share of texts equal to Standard's, and where the others part from it."""
        found = {}
        for mode, answers in self.by_mode.items():
            places = [self.first_difference(prompt, mode) for prompt in range(len(self.prompts))]
            apart = [place for place in places if place is not None]
            same = [a.text == b.text for a, b in zip(answers.answers, self.by_mode["standard"].answers, strict=True)]
            found[mode] = answers.to_json() | {
                "positions_read": self.positions_read(mode),
                "identical_texts": sum(same) / len(same),
                "first_difference_median": median(apart) if apart else None,
            }
        return found


def compare_modes(
    model: FeedbackModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    feedback_passes: FeedbackPasses | None = None,
    *,
    stop: str | Sequence[str] = (),
    batch_size: int = 16,
    on_step: Callable[[ModeName, int, NewText], None] | None = None,
    **settings: Unpack[Settings],
) -> Comparison:
    """Continue every prompt once in each mode, with the same settings and random numbers. Compute is not equal: Fused reads the
    prompts in 1 + `feedback_passes` passes (default 1), the others in one (`Comparison.positions_read`).

    batch_size  prompts read at a time; times are for all batches together
    on_step     called with the mode, the number of the batch's first prompt and each step

    Other arguments and errors are those of `stream_texts`. ValueError for n above 1: samples have no partners.
    """
    if settings.get("n", 1) != 1:
        raise ValueError(f"a comparison takes one answer of each mode, not n={settings['n']}")
    if batch_size < 1:
        raise ValueError(f"a batch has at least one prompt, not {batch_size}")
    modes = [resolve_mode(name, feedback_passes if name == "fused" else None) for name in MODES]
    lengths = [len(tokenizer.begin(prompt)) for prompt in prompts]
    context, given = model.trunk.context, settings.get("keys")
    keys = range(len(prompts)) if given is None else given
    if settings.get("overflow") == "slide":
        lengths = [length if length <= context else kept_of(context) for length in lengths]
    _warm_up(model, tokenizer, prompts[0])
    by_mode: dict[ModeName, ModeAnswers] = {}
    for mode in modes:
        answers: list[Answer] = []
        first, steps, begun = 0.0, 0, time.perf_counter()
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            gathered = [_Gathered() for _ in batch]
            opened, made = time.perf_counter(), 0
            passes = mode.feedback_passes if mode.name == "fused" else None
            own: Settings = {**settings, "keys": keys[start : start + batch_size]}
            for new in stream_texts(model, tokenizer, batch, mode.name, passes, stop=stop, **own):
                made += 1
                if made == 1:
                    first += time.perf_counter() - opened
                for row, answer in enumerate(gathered):
                    answer.take(row, new)
                if on_step is not None:
                    on_step(mode.name, start, new)
            steps += made - 1
            answers += [answer.answer() for answer in gathered]
        by_mode[mode.name] = ModeAnswers(mode, answers, first, time.perf_counter() - begun, steps)
    return Comparison(list(prompts), lengths, by_mode)


class _Gathered:
    """An answer under way."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.reason: FinishReason | None = None

    def take(self, row: int, new: NewText) -> None:
        if row in new.tokens:
            self.tokens.append(new.tokens[row])
            self.pieces.append(new.texts.get(row, ""))
        elif row in new.texts:  # a stop id set free what was held back
            self.pieces[-1] += new.texts[row]
        self.reason = new.finished.get(row, self.reason)

    def answer(self) -> Answer:
        assert self.reason is not None
        return Answer(self.tokens, self.pieces, self.reason)


def _warm_up(model: FeedbackModel, tokenizer: Tokenizer, prompt: str) -> None:
    """Two tokens in fused mode: what a device does only once should not be counted against the mode that comes first."""
    tokens = tokenizer.begin(prompt)[: min(WARM_UP, model.trunk.context - 2)]
    if tokens and model.trunk.context > 2:
        for _ in stream(model, [tokens], "fused", max_new_tokens=2):
            pass
