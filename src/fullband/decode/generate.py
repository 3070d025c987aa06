"""Generate: tokens all at once (`generate`), and from texts to texts (`stream_texts`, `generate_texts`, `generate_text`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from fullband.data.tokenizer import Tokenizer
from fullband.decode.options import Settings
from fullband.decode.prompts import TokenLists
from fullband.decode.steps import FinishReason, TokenStream, stream
from fullband.decode.stops import StopFilter, check_stop_strings
from fullband.feedback.passes import FeedbackModel
from fullband.feedback_config import FeedbackPasses


@dataclass(frozen=True)
class Completion:
    """The new tokens of one row, without prompt and stop id, and why it ended."""

    tokens: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class TextCompletion:
    """The new text of one row, without stop string; the tokens it made, those of the stop string included; and why it ended."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class NewText:
    """One step of generation, by row number: the characters that became whole, the tokens made, and the rows that finished."""

    texts: dict[int, str]
    tokens: dict[int, int]
    finished: dict[int, FinishReason]


def generate(
    model: FeedbackModel,
    prompts: TokenLists | Tensor,
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    mask: Tensor | None = None,
    **settings: Unpack[Settings],
) -> list[Completion]:
    """n completions a prompt, prompt by prompt. Arguments and errors are those of `stream`."""
    return collect(stream(model, prompts, mode, feedback_passes, mask=mask, **settings))


def collect(steps: TokenStream) -> list[Completion]:
    """One completion for each row that a stream still has, in order."""
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}
    for new in steps:
        for row, token in new.tokens.items():
            tokens.setdefault(row, []).append(token)
        reasons |= new.finished
    return [Completion(tokens.get(row, []), reasons[row]) for row in sorted(reasons)]


def stream_texts(
    model: FeedbackModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    stop: str | Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Iterator[NewText]:
    """The continuations of texts, one step at a time. Only whole characters are given out, and none that could still be a stop string's.

    prompts   texts, which begin as the tokenizer begins texts (`Tokenizer.begin`), or their ids where they were encoded in another way
    stop      strings that end a row's text where they begin. They are looked for in the text made by the row, across tokens; the one that
              is complete first counts
    settings  as in `GenerateOptions`; `stop_ids` None (the default) = the tokenizer's own

    Errors are those of `stream`, raised at once, and ValueError for an empty stop string.
    """
    strings = check_stop_strings(stop)
    if isinstance(prompts, str):
        raise ValueError("prompts is a list of texts; give [text] for one")
    if settings.get("stop_ids") is None:
        settings["stop_ids"] = [token for token in tokenizer.stops if token < model.trunk.vocab_size]
    ids = [tokenizer.begin(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    steps = stream(model, ids, mode, feedback_passes, **settings)
    texts = row_texts(tokenizer, ids, strings, steps.rows, settings.get("min_new_tokens", 0))
    return text_steps(steps, texts)


def generate_texts(
    model: FeedbackModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    stop: str | Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
    **settings: Unpack[Settings],
) -> list[TextCompletion]:
    """n continuations a text, prompt by prompt. `on_text(row, piece)` gets them piece by piece, each of whole characters.

    Other arguments and errors are those of `stream_texts`.
    """
    steps = stream_texts(model, tokenizer, prompts, mode, feedback_passes, stop=stop, **settings)
    rows = range(len(prompts) * settings.get("n", 1))
    tokens: list[list[int]] = [[] for _ in rows]
    pieces: list[list[str]] = [[] for _ in rows]
    reasons: dict[int, FinishReason] = {}
    for new in steps:
        for row, token in new.tokens.items():
            tokens[row].append(token)
        for row, piece in new.texts.items():
            pieces[row].append(piece)
            if on_text is not None:
                on_text(row, piece)
        reasons |= new.finished
    return [TextCompletion("".join(pieces[row]), tokens[row], reasons[row]) for row in rows]


def generate_text(
    model: FeedbackModel,
    tokenizer: Tokenizer,
    prompt: str,
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    stop: str | Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
    **settings: Unpack[Settings],
) -> TextCompletion:
    """The continuation of one text. `on_text` gets it piece by piece. Other arguments and errors are those of `stream_texts`;
    ValueError for n above 1, which is for `generate_texts`."""
    if settings.get("n", 1) > 1:
        raise ValueError(f"generate_text makes one text, not n={settings['n']}; generate_texts makes more")
    give = None if on_text is None else lambda row, piece: on_text(piece)
    return generate_texts(model, tokenizer, [prompt], mode, feedback_passes, stop=stop, on_text=give, **settings)[0]


class RowText:
    """Tokens of one row to text that can be given out."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], strings: Sequence[str], unsearched: int):
        """The text stands behind that of the prompt's ids. No stop string begins in the text of the first `unsearched` tokens."""
        self._decoder, self._filter, self._unsearched = tokenizer.stream(prompt), StopFilter(strings), unsearched

    @property
    def stopped(self) -> bool:
        return self._filter.stopped

    def push(self, token: int) -> str:
        piece = self._decoder.push(token)
        self._unsearched -= 1
        return piece if self._unsearched >= 0 else self._filter.push(piece)

    def finish(self) -> str:
        return self._filter.push(self._decoder.finish()) + self._filter.finish()


def row_texts(tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], strings: Sequence[str], rows: int, unsearched: int) -> list[RowText]:
    """One for each row of a stream, as many for each prompt."""
    return [RowText(tokenizer, prompts[row * len(prompts) // rows], strings, unsearched) for row in range(rows)]


def text_steps(steps: TokenStream, texts: list[RowText]) -> Iterator[NewText]:
    for new in steps:
        pieces = {row: texts[row].push(token) for row, token in new.tokens.items()}
        finished = dict(new.finished)
        for row in new.finished:
            pieces[row] = pieces.get(row, "") + texts[row].finish()
        stopped: dict[int, FinishReason] = {row: "stop" for row in pieces if texts[row].stopped}
        steps.drop(stopped)
        yield NewText({row: piece for row, piece in pieces.items() if piece}, new.tokens, finished | stopped)
