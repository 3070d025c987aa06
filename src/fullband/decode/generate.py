"""Generate: prompts to tokens, step by step (`stream`), all at once (`generate`), or from text to text (`generate_text`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.config import FeedbackPasses
from fullband.data.tokenizers import Tokenizer
from fullband.decode.modes import Mode, resolve_mode, step
from fullband.decode.prefill import prefill_aligned
from fullband.decode.prompts import AlignedPrompts, TokenLists, align_prompts
from fullband.decode.sampling import Sampler
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.state import DecodeState

FinishReason = Literal["stop", "length"]  # a stop id was chosen; max_new_tokens were made


@dataclass(frozen=True)
class NewTokens:
    """One step of generation: the new token of every row that made one, and the rows that finished with it, by row number."""

    tokens: dict[int, int]
    finished: dict[int, FinishReason]


@dataclass(frozen=True)
class Completion:
    """The new tokens of one row, without prompt and stop id, and why it ended."""

    tokens: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class TextCompletion:
    """A completion and its text."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason


def stream(
    model: FeedbackModel,
    prompts: TokenLists | Tensor,
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    mask: Tensor | None = None,
    chunk: int | None = None,
) -> Iterator[NewTokens]:
    """The new tokens of all rows, one step at a time; rows that finish leave the batch.

    prompts, mask, chunk   as in `prefill`
    mode, feedback_passes  as in `resolve_mode`
    temperature, seed      0 = the likeliest token; else a row's draws depend on (seed, its row number) alone
    stop_ids               end a row; they are not among its tokens

    The prompts are read at once, the tokens made as they are asked for. Raises ValueError for bad prompts or settings, and where a
    prompt and `max_new_tokens` together exceed the context.
    """
    resolved = resolve_mode(mode, feedback_passes)
    aligned = align_prompts(model.trunk, prompts, mask)
    _check_room(aligned, max_new_tokens, model.trunk.context)
    sampler = Sampler(temperature, seed, range(len(aligned.lengths_B)), max_new_tokens, aligned.tokens_BT.device)
    state = prefill_aligned(model, aligned, resolved.feedback_passes, chunk)
    return _steps(model, state, resolved, max_new_tokens, sampler, frozenset(stop_ids))


def generate(
    model: FeedbackModel,
    prompts: TokenLists | Tensor,
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    mask: Tensor | None = None,
    chunk: int | None = None,
) -> list[Completion]:
    """One completion a prompt, in order. Arguments and errors are those of `stream`."""
    steps = stream(
        model,
        prompts,
        mode,
        feedback_passes,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop_ids=stop_ids,
        mask=mask,
        chunk=chunk,
    )
    tokens: list[list[int]] = [[] for _ in range(len(prompts))]
    reasons: dict[int, FinishReason] = {}
    for new in steps:
        for row, token in new.tokens.items():
            tokens[row].append(token)
        reasons |= new.finished
    return [Completion(row_tokens, reasons[row]) for row, row_tokens in enumerate(tokens)]


def generate_text(
    model: FeedbackModel,
    tokenizer: Tokenizer,
    prompt: str,
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Collection[int] | None = None,
    chunk: int | None = None,
    on_text: Callable[[str], None] | None = None,
) -> TextCompletion:
    """The continuation of a text. `on_text` gets it piece by piece, each of whole characters. Errors are those of `stream`.

    stop_ids   None = the tokenizer's own
    """
    steps = stream(
        model,
        [tokenizer.encode(prompt)],
        mode,
        feedback_passes,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop_ids=tokenizer.stops if stop_ids is None else stop_ids,
        chunk=chunk,
    )
    decoder = tokenizer.stream()
    tokens: list[int] = []
    pieces: list[str] = []
    reason: FinishReason = "length"

    def give(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

    for new in steps:
        reason = new.finished.get(0, reason)
        for token in new.tokens.values():
            tokens.append(token)
            give(decoder.push(token))
    give(decoder.finish())
    return TextCompletion("".join(pieces), tokens, reason)


@torch.no_grad()
def _steps(
    model: FeedbackModel, state: DecodeState, mode: Mode, max_new_tokens: int, sampler: Sampler, stops: frozenset[int]
) -> Iterator[NewTokens]:
    rows_N = torch.arange(state.top_BD.shape[0], device=state.top_BD.device)  # numbers of the rows still in the batch
    numbers = rows_N.tolist()
    for made in range(1, max_new_tokens + 1):
        tokens_N = sampler(F.linear(state.top_BD, model.trunk.head_weight), rows_N, made - 1)
        chosen = dict(zip(numbers, tokens_N.tolist(), strict=True))
        stopped = {row for row, token in chosen.items() if token in stops}
        going = [place for place, row in enumerate(numbers) if row not in stopped]
        full = made == max_new_tokens
        yield NewTokens(
            tokens={row: token for row, token in chosen.items() if row not in stopped},
            finished={row: "stop" if row in stopped else "length" for row in numbers if full or row in stopped},
        )
        if full or not going:
            return
        if stopped:
            kept = torch.tensor(going, device=rows_N.device)
            state, tokens_N, rows_N = state.select(kept), tokens_N[kept], rows_N[kept]
            numbers = rows_N.tolist()
        state = step(model, state, tokens_N, mode)


def _check_room(aligned: AlignedPrompts, max_new_tokens: int, context: int) -> None:
    """Raises ValueError if a row would outgrow the context: its text could not be read again."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is at least 1, not {max_new_tokens}")
    longest = int(aligned.lengths_B.max())
    if longest + max_new_tokens > context:
        number = int(aligned.lengths_B.argmax())
        raise ValueError(
            f"prompt {number} has {longest} tokens; with max_new_tokens={max_new_tokens} it exceeds the model's context of {context} "
            f"(room for {context - longest})"
        )
