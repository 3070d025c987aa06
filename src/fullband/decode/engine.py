"""The token loop, which knows no text: prefill the prompts, choose a token for every row, run it, and so on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from fullband.decode.options import GenerateOptions, GenerateSettings
from fullband.decode.prefill import prefill_reported
from fullband.decode.prompts import AlignedPrompts, TokenLists, align_prompts
from fullband.decode.running import RunningBatch
from fullband.decode.sampling import NO_TOKEN, History, Sampler
from fullband.decode.speculate import SpeculationReport
from fullband.decode.static import StaticBatch
from fullband.feedback.converged import ConvergedReport
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.state import DecodeState
from fullband.feedback_config import FeedbackPasses

FinishReason = Literal["stop", "length", "cancelled"]  # a stop id or stop string was made; the row is as long as it may be
_REASONS: tuple[FinishReason | None, ...] = (None, "length", "stop")


@dataclass(frozen=True)
class Completion:
    """The new tokens of one row, without prompt and stop id, and why it ended."""

    tokens: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class NewTokens:
    """One step of generation: the new token of every row that made one, and the rows that finished with it, by row number."""

    tokens: dict[int, int]
    finished: dict[int, FinishReason]


def generate(
    model: FeedbackModel,
    prompts: TokenLists | Tensor,
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    mask: Tensor | None = None,
    **settings: Unpack[GenerateSettings],
) -> list[Completion]:
    """n completions a prompt, prompt by prompt. Arguments and errors are those of `stream`."""
    return collect(stream(model, prompts, mode, feedback_passes, mask=mask, **settings))


def stream(
    model: FeedbackModel,
    prompts: TokenLists | Tensor,
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    mask: Tensor | None = None,
    **settings: Unpack[GenerateSettings],
) -> TokenStream:
    """The new tokens of all rows, one step at a time; rows that finish leave the batch.

    prompts, mask                    as in `prefill`
    mode, feedback_passes, settings  as in `GenerateOptions`

    The prompts are prefilled at once, the tokens made as they are asked for. Raises ValueError for bad prompts or settings, before anything
    is computed; and at a step whose logits, as the model and the logit processors made them, leave no token to choose.
    """
    return stream_prompts(model, prompts, _without_texts(GenerateOptions(mode=mode, feedback_passes=feedback_passes, **settings)), mask)


def stream_prompts(model: FeedbackModel, prompts: TokenLists | Tensor, options: GenerateOptions, mask: Tensor | None = None) -> TokenStream:
    """`stream` with its options as one object."""
    aligned = align_prompts(model.trunk, prompts, mask, options.cut_to(model.trunk.context))
    rows = _RowLimits.of(model, options, aligned.lengths_B.tolist())  # before anything is computed
    state, converged = prefill_reported(model, aligned, options.resolved_mode.feedback_passes, options.chunk)
    return TokenStream(model, state, options, rows, _tokens_of(aligned), converged)


def stream_from(
    model: FeedbackModel,
    state: DecodeState,
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    *,
    prompts: TokenLists | Tensor | None = None,
    mask: Tensor | None = None,
    **settings: Unpack[GenerateSettings],
) -> TokenStream:
    """`stream` from a state that `prefill` made (with the mode's feedback passes). The state stays valid: it can be continued again,
    with another seed or mode, in n samples at a time, and each continuation equals that of prompts prefilled anew.

    prompts, mask  what the state was made of. Needed where a token looks back at the text: by a repetition penalty and by
                   overflow="slide"; logit processors see new tokens only without them

    Raises ValueError as `stream`, for prompts that the state cannot be of, and where they are needed and not given.
    """
    options = _without_texts(GenerateOptions(mode=mode, feedback_passes=feedback_passes, **settings))
    lengths: list[int] = state.positions_B.tolist()
    rows = _RowLimits.of(model, options, lengths)
    if prompts is None:
        for needed, name in ((options.repetition_penalty != 1, "repetition_penalty"), (options.overflow == "slide", "overflow='slide'")):
            if needed:
                raise ValueError(f"{name} looks back at the text: give the prompts that the state was made of")
        tokens_BT = state.positions_B.new_empty(len(lengths), 0)
    else:
        aligned = align_prompts(model.trunk, prompts, mask)
        if aligned.lengths_B.tolist() != lengths:
            raise ValueError(f"the state is of prompts of {lengths} tokens, the prompts have {aligned.lengths_B.tolist()}")
        tokens_BT = _tokens_of(aligned)
    return TokenStream(model, state.fork(), options, rows, tokens_BT)


def collect(steps: TokenStream) -> list[Completion]:
    """One completion for each row that a stream still has, in order."""
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}
    for new in steps:
        for row, token in new.tokens.items():
            tokens.setdefault(row, []).append(token)
        reasons |= new.finished
    return [Completion(tokens.get(row, []), reasons[row]) for row in sorted(reasons)]


def _without_texts(options: GenerateOptions) -> GenerateOptions:
    if options.stop_strings:
        raise ValueError("stop strings need a tokenizer: use stream_texts, generate_texts or generate_text, or stop_ids")
    return options


class _RowLimits(NamedTuple):
    """Of every row its key, and the most tokens it makes; the stop ids."""

    keys: list[tuple[int, int]]
    limits: list[int]
    stops: list[int]

    @classmethod
    def of(cls, model: FeedbackModel, options: GenerateOptions, lengths: list[int]) -> _RowLimits:
        """Raises ValueError for what doesn't go together."""
        limits = [limit for limit in options.limits(lengths, model.trunk) for _ in range(options.n)]
        return cls(options.row_keys(len(lengths)), limits, options.stops(model.trunk.vocab_size))


class TokenStream(Iterator[NewTokens]):
    """Iterates over the steps of generation. A row can be dropped at any time, and so can the whole stream."""

    def __init__(
        self,
        model: FeedbackModel,
        state: DecodeState,
        options: GenerateOptions,
        rows: _RowLimits,
        tokens_BT: Tensor,
        converged: ConvergedReport | None = None,
    ):
        """Made by `stream` and `stream_from`. `tokens_BT` is what the state was made of, as far as it is known, -1 in padding; `converged`
        what that took, where passes were repeated until the states settled."""
        device, mode = state.top_BD.device, options.resolved_mode
        self._model, self._options, self.converged = model, options, converged
        texts_NT = tokens_BT.repeat_interleave(options.n, dim=0)
        repeated = state if options.n == 1 else state.repeat(options.n)
        self.speculation_report = SpeculationReport()
        self._batch: RunningBatch | StaticBatch
        if options.in_fixed_buffers:
            self._batch = StaticBatch(model, mode, repeated, rows.limits, options.compile)
        else:
            self._batch = RunningBatch(model, mode, repeated, options.chunk, options.speculation, texts_NT, self.speculation_report)
        self._sampler = Sampler(options, rows.keys, max(rows.limits), device, rows.stops)
        self._limits_N = torch.tensor(rows.limits, device=device)
        self._rows_N = torch.arange(len(rows.keys), device=device)
        self._numbers = self._rows_N.tolist()  # of the rows still in the batch
        self._history: History | None = None
        if options.processors or options.repetition_penalty != 1 or options.overflow == "slide":
            vocab_size = model.trunk.vocab_size if options.repetition_penalty != 1 else None
            self._history = History(texts_NT, max(rows.limits), vocab_size)
        self._made = 0
        self._pending_N: Tensor | None = None  # the tokens of the last step, which have not been run yet
        self._leaving: set[int] = set()

    def drop(self, rows: Iterable[int]) -> None:
        """These rows leave the batch before the next step, and are not seen again."""
        self._leaving.update(rows)

    def close(self) -> None:
        """All rows leave, now."""
        self.drop(self._numbers)
        self._let_go()

    @property
    def rows(self) -> int:
        """Rows still in the batch."""
        return len(self._numbers) - len(self._leaving.intersection(self._numbers))

    @torch.no_grad()
    def __next__(self) -> NewTokens:
        self._let_go()
        if not self._numbers:
            raise StopIteration
        if self._options.is_cancelled():
            self.drop(self._numbers)
            return NewTokens({}, dict.fromkeys(self._numbers, "cancelled"))
        if self._pending_N is not None:
            self._batch.feed(self._pending_N, self._history)
            self._pending_N = None
        tokens_N = self._sampler(self._model.trunk.head(self._batch.top_ND), self._rows_N, self._made, self._history)
        self._made += 1
        ended_N = torch.isin(tokens_N, self._sampler.stops_S) * 2
        ended_N = torch.maximum(ended_N, (self._limits_N <= self._made).long())
        tokens, ended = torch.stack([tokens_N, ended_N]).tolist()  # the one look at the device
        chosen = dict(zip(self._numbers, tokens, strict=True))
        if min(tokens) < 0:
            row = self._numbers[tokens.index(min(tokens))]
            self.close()
            raise ValueError(f"row {row} has no token to choose: its logits are all -inf, or some are not numbers")
        self._pending_N = tokens_N
        if self._history is not None:
            self._history.append(tokens_N)
        if not any(ended):
            return NewTokens(chosen, {})
        finished = {row: reason for row, code in zip(self._numbers, ended, strict=True) if (reason := _REASONS[code]) is not None}
        self.drop(finished)
        return NewTokens({row: token for row, token in chosen.items() if finished.get(row) != "stop"}, finished)

    def _let_go(self) -> None:
        """Rows that leave are taken out of everything that has rows."""
        if not self._leaving.intersection(self._numbers):
            return
        kept = [place for place, row in enumerate(self._numbers) if row not in self._leaving]
        self._leaving.clear()
        self._numbers = [self._numbers[place] for place in kept]
        if not kept:
            del self._batch, self._history, self._pending_N  # nothing is kept alive by an iterator that has ended
            return
        kept_N = torch.tensor(kept, device=self._rows_N.device)
        self._batch.select(kept_N)
        self._rows_N, self._limits_N = self._rows_N[kept_N], self._limits_N[kept_N]
        self._pending_N = None if self._pending_N is None else self._pending_N[kept_N]
        if self._history is not None:
            self._history.select(kept_N)


def _tokens_of(aligned: AlignedPrompts) -> Tensor:
    """Tokens [B, T], -1 in padding."""
    documents_BT = aligned.layout.documents_BT
    return aligned.tokens_BT if documents_BT is None else aligned.tokens_BT.where(documents_BT >= 0, NO_TOKEN)
