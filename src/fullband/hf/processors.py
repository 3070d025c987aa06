"""transformers' logits processors that look back at the text, run on each row's own tokens: padding is no token that has been used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

# What a processor of this kind is for a row whose prompt is [1, T]: those that keep the prompt are made anew from the row's.
_FOR_ROW: dict[type, Callable[[Any, Any], Any]] = {
    RepetitionPenaltyLogitsProcessor: lambda own, _: RepetitionPenaltyLogitsProcessor(own.penalty),
    NoRepeatNGramLogitsProcessor: lambda own, _: own,
    SequenceBiasLogitsProcessor: lambda own, _: own,
    NoBadWordsLogitsProcessor: lambda own, _: own,
    EncoderRepetitionPenaltyLogitsProcessor: lambda own, prompt: EncoderRepetitionPenaltyLogitsProcessor(1 / own.penalty, prompt),
    EncoderNoRepeatNGramLogitsProcessor: lambda own, prompt: EncoderNoRepeatNGramLogitsProcessor(own.ngram_size, prompt),
}


class OnOwnTokens(LogitsProcessor):
    """A processor that looks back, for prompts [P, T] of which `mask` [P, T] marks the tokens. Several rows may go on from one prompt
    (beams, samples): they stand one after another."""

    def __init__(self, processor: LogitsProcessor, prompts: Tensor, mask: Tensor) -> None:
        self._real = mask.bool()
        own = [prompt[real][None] for prompt, real in zip(prompts, self._real.to(prompts.device), strict=True)]
        self._of_prompt = [_FOR_ROW[type(processor)](processor, prompt) for prompt in own]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` [B, V] of rows `input_ids` [B, T + new], B a multiple of P."""
        each, length = len(input_ids) // len(self._of_prompt), self._real.shape[1]
        done = []
        for row, (tokens, own) in enumerate(zip(input_ids, scores, strict=True)):
            real = self._real[row // each].to(tokens.device)
            text = torch.cat([tokens[:length][real], tokens[length:]])
            done.append(self._of_prompt[row // each](text[None], own[None]))
        return torch.cat(done)


def on_own_tokens(processors: Sequence[LogitsProcessor], prompts: Tensor | None, mask: Tensor | None) -> LogitsProcessorList:
    """The processors, those that look back made to skip padding. Unchanged where there is none. A repetition penalty that was told how much
    of the rows to ignore is left to do so."""
    padded = prompts is not None and mask is not None and mask.shape == prompts.shape and not bool(mask.all())

    def adapted(processor: LogitsProcessor) -> LogitsProcessor:
        told = isinstance(getattr(processor, "prompt_ignore_length", None), int)
        if type(processor) not in _FOR_ROW or told or prompts is None or mask is None:
            return processor
        return OnOwnTokens(processor, prompts, mask)

    return LogitsProcessorList(map(adapted, processors) if padded else processors)
