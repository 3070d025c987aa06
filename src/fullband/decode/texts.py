"""From texts to texts: prompts are tokenised, continued by the token loop, and what becomes whole is given out (`TextStream`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from fullband.data.tokenizer import Tokenizer
from fullband.decode.engine import FinishReason, stream_prompts
from fullband.decode.options import GenerateOptions, GenerateSettings
from fullband.decode.speculate import SpeculationReport
from fullband.feedback.passes import FeedbackModel
from fullband.feedback_config import FeedbackPasses


@dataclass(frozen=True)
class TextCompletion:
    """The new text of one row, without stop string; the tokens it made, those of the stop string included; why it ended; and the
    characters that became whole with each token."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    pieces: list[str] = field(default_factory=list, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": self.tokens, "finish_reason": self.finish_reason}


@dataclass(frozen=True)
class NewText:
    """One step of generation, by row number: the characters that became whole, the tokens made, and the rows that finished."""

    texts: dict[int, str]
    tokens: dict[int, int]
    finished: dict[int, FinishReason]


class TextStream(Iterator[NewText]):
    """The continuations of texts, one step at a time. Only whole characters are given out, and none that could still be a stop string's.

    rows        of all prompts: sample s of prompt i is row i·n + s
    converged   what prefilling took where passes were repeated until the states settled; None otherwise
    """

    def __init__(self, model: FeedbackModel, tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int]], options: GenerateOptions):
        """Prefills the prompts: texts, which begin as the tokenizer begins texts (`Tokenizer.begin`), or their ids where they were encoded
        already. Raises ValueError as `stream`."""
        if isinstance(prompts, str):
            raise ValueError("prompts is a list of texts; give [text] for one")
        if options.stop_ids is None:
            options = replace(options, stop_ids=[token for token in tokenizer.stops if token < model.trunk.vocab_size])
        ids = [tokenizer.begin(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        self._steps = stream_prompts(model, ids, options)
        self.rows, self.converged = self._steps.rows, self._steps.converged
        self._texts = [RowText(tokenizer, ids[row // options.n], options.stop_strings, options.min_new_tokens) for row in range(self.rows)]

    @property
    def speculation(self) -> SpeculationReport:
        """What self-speculation has done so far."""
        return self._steps.speculation_report

    def __next__(self) -> NewText:
        new, texts = next(self._steps), self._texts
        took = {row: texts[row].take(new.tokens.get(row), new.finished.get(row)) for row in {**new.tokens, **new.finished}}
        finished = {row: reason for row, (_, reason) in took.items() if reason is not None}
        self._steps.drop(finished)
        return NewText({row: piece for row, (piece, _) in took.items() if piece}, new.tokens, finished)

    def close(self) -> None:
        """All rows leave, now."""
        self._steps.close()

    def completions(self, watch: Callable[[NewText], None] | None = None) -> Iterator[TextCompletion]:
        """The completion of row 0, 1, 2, …, each as soon as it and all before it are complete. `watch` sees every step."""
        finished: dict[int, FinishReason] = {}
        next_row = 0
        for new in self:
            finished |= new.finished
            if watch is not None:
                watch(new)
            while next_row in finished:
                yield self.completion(next_row, finished[next_row])
                next_row += 1

    def completion(self, row: int, reason: FinishReason = "cancelled") -> TextCompletion:
        """What a row has made so far."""
        made = self._texts[row]
        return TextCompletion("".join(made.pieces), made.tokens, reason, made.pieces)


def stream_texts(
    model: FeedbackModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    **settings: Unpack[GenerateSettings],
) -> TextStream:
    """The continuations of texts, one step at a time. Arguments are those of `TextStream` and `GenerateOptions`. Errors are raised now."""
    return TextStream(model, tokenizer, prompts, GenerateOptions(mode=mode, feedback_passes=feedback_passes, **settings))


def generate_texts(
    model: FeedbackModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    on_text: Callable[[int, str], None] | None = None,
    **settings: Unpack[GenerateSettings],
) -> list[TextCompletion]:
    """n continuations a text, prompt by prompt. `on_text(row, piece)` gets them piece by piece, each of whole characters.

    Other arguments and errors are those of `stream_texts`.
    """

    def hand_on(new: NewText) -> None:
        if on_text is not None:
            for row, piece in new.texts.items():
                on_text(row, piece)

    return list(stream_texts(model, tokenizer, prompts, mode, feedback_passes, **settings).completions(hand_on))


def generate_text(
    model: FeedbackModel,
    tokenizer: Tokenizer,
    prompt: str,
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
    **settings: Unpack[GenerateSettings],
) -> TextCompletion:
    """The continuation of one text. `on_text` gets it piece by piece. Other arguments and errors are those of `stream_texts`;
    ValueError for n above 1, which is for `generate_texts`."""
    if settings.get("n", 1) > 1:
        raise ValueError(f"generate_text makes one text, not n={settings['n']}; generate_texts makes more")
    give = None if on_text is None else lambda row, piece: on_text(piece)
    return generate_texts(model, tokenizer, [prompt], mode, feedback_passes, on_text=give, **settings)[0]


class RowText:
    """Tokens of one row to text that can be given out: all `tokens` so far, and the `pieces` of text that became whole with each."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], strings: Sequence[str], unsearched: int):
        """The text follows that of the prompt's ids. No stop string begins in the text of the first `unsearched` tokens."""
        self._decoder, self._filter, self._unsearched = tokenizer.stream(prompt), StopFilter(strings), unsearched
        self.tokens: list[int] = []
        self.pieces: list[str] = []

    def take(self, token: int | None, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """A step of the row: its token (None = it made none) and why it ends with it, if it does -> the text that can be given out, and
        why the row ends now that stop strings were looked for."""
        piece = "" if token is None else self.push(token)
        if reason is not None:
            piece += self.finish()
        return piece, "stop" if self._filter.stopped else reason

    def push(self, token: int) -> str:
        piece = self._decoder.push(token)
        self.tokens.append(token)
        self.pieces.append(piece if len(self.tokens) <= self._unsearched else self._filter.push(piece))
        return self.pieces[-1]

    def finish(self) -> str:
        """What was held back, which counts for the last token."""
        rest = self._filter.push(self._decoder.finish()) + self._filter.finish()
        if rest:
            self.pieces[-1] += rest
        return rest


class StopFilter:
    """Text up to the first stop string, whatever the pieces in which it arrives.

    The stop string that is complete first ends the text; of two that end with the same character, the longer one.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = strings
        self._longest = max(map(len, strings), default=0)
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that can be given out now. Nothing comes after a stop string."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(start + len(string), start) for string in self._strings if (start := text.find(string)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        whole = len(text) - self._beginning(text)
        self._held = text[whole:]
        return text[:whole]

    def finish(self) -> str:
        """The text that was held back: it was no stop string."""
        rest, self._held = self._held, ""
        return rest

    def _beginning(self, text: str) -> int:
        """Characters at the end of the text with which a stop string begins."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(string.startswith(text[-size:]) for string in self._strings):
                return size
        return 0
