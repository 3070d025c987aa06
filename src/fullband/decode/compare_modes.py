"""The three modes side by side: the same prompts continued in each, where the answers part, and what each took (Fig. 8, App. G)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from fullband.data.tokenizer import Tokenizer
from fullband.decode.engine import generate
from fullband.decode.modes import Mode, ModeName, resolve_mode
from fullband.decode.options import GenerateOptions
from fullband.decode.texts import NewText, TextCompletion, TextStream
from fullband.feedback.passes import FeedbackModel

MODES: tuple[ModeName, ...] = ("standard", "soft", "fused")
WARM_UP = 8  # tokens of the first prompt, run before the clock starts


@dataclass(frozen=True)
class ModeAnswers:
    """What one mode did with all prompts.

    first_token_seconds  prefilling the prompts and choosing their first tokens
    seconds              everything; batches one after the other
    steps                steps of decoding after the first tokens: a step makes a token of every row of a batch
    """

    mode: Mode
    answers: list[TextCompletion]
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
class ModeComparison:
    """prompts, the tokens of each that were prefilled, and the answers by mode, in the order of `MODES`."""

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
        """Positions the trunk computed to prefill the prompts: tokens x passes. None for "converged", where that depends on the text."""
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
    options: GenerateOptions,
    tokens: Sequence[Sequence[int]] | None = None,
    batch_size: int = 16,
    on_step: Callable[[ModeName, int, NewText], None] | None = None,
) -> ModeComparison:
    """Continue every prompt once in each mode, with the same settings and random numbers. Compute is not equal: Fused runs the
    prompts in 1 + `options.feedback_passes` passes (default 1), the others in one (`ModeComparison.positions_read`).

    options     its mode says nothing here
    tokens      ids of the prompts where they were encoded already
    batch_size  prompts prefilled at a time; times are for all batches together
    on_step     called with the mode, the number of the batch's first prompt and each step

    Errors are those of `stream_texts`. ValueError for n above 1: samples have no partners.
    """
    if options.n != 1:
        raise ValueError(f"a comparison takes one answer of each mode, not n={options.n}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    ids = [tokenizer.begin(prompt) for prompt in prompts] if tokens is None else tokens
    context, keys = model.trunk.context, range(len(prompts)) if options.keys is None else options.keys
    cut_to = options.cut_to(context)
    lengths = [len(row) if cut_to is None or len(row) <= context else cut_to for row in ids]
    _warm_up(model, ids[0])
    by_mode: dict[ModeName, ModeAnswers] = {}
    for mode in (resolve_mode(name, options.feedback_passes if name == "fused" else None) for name in MODES):
        answers: list[TextCompletion] = []
        first, steps, begun = 0.0, 0, time.perf_counter()
        for start in range(0, len(prompts), batch_size):
            here, opened = slice(start, start + batch_size), time.perf_counter()
            own = replace(options.in_mode(mode), keys=keys[here])
            clock = _Clock(None if on_step is None else partial(on_step, mode.name, start))
            answers += TextStream(model, tokenizer, ids[here], own).completions(clock)
            first += clock.times[0] - opened
            steps += len(clock.times) - 1
        by_mode[mode.name] = ModeAnswers(mode, answers, first, time.perf_counter() - begun, steps)
    return ModeComparison(list(prompts), lengths, by_mode)


class _Clock:
    """When each step ended."""

    def __init__(self, watch: Callable[[NewText], None] | None):
        self.times: list[float] = []
        self._watch = watch

    def __call__(self, new: NewText) -> None:
        self.times.append(time.perf_counter())
        if self._watch is not None:
            self._watch(new)


def _warm_up(model: FeedbackModel, prompt: Sequence[int]) -> None:
    """Two tokens in fused mode: what a device does only once should not be counted against the mode that comes first."""
    tokens = prompt[: min(WARM_UP, model.trunk.context - 2)]
    if tokens and model.trunk.context > 2:
        generate(model, [tokens], "fused", max_new_tokens=2)
