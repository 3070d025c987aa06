"""How far the log-probabilities that a trainer computes are from those under which a server sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fullband.decode.answers import SampledAnswer, answer_logprobs
from fullband.feedback.passes import FeedbackModel
from fullband.feedback_config import FeedbackPasses

RATIOS = (0.8, 1.2)  # between which clipped policy gradients leave a ratio of probabilities alone


@dataclass(frozen=True)
class Mismatch:
    """Δ log p = recomputed − sampled, over all tokens of all answers, in nats.

    answer_passes   feedback passes over the answers in which they were recomputed
    tokens          compared
    mean, largest   of |Δ log p|
    outside         share of ratios exp(Δ log p) outside `RATIOS`
    """

    answer_passes: FeedbackPasses
    tokens: int
    mean: float
    largest: float
    outside: float

    @classmethod
    def of(cls, answer_passes: FeedbackPasses, recomputed: Sequence[Tensor], answers: Sequence[SampledAnswer]) -> Mismatch:
        """`recomputed` log-probabilities [tokens] of each answer. Raises ValueError for answers without log-probabilities."""
        sampled = [value for answer in answers for value in answer.logprobs]
        if not sampled:
            raise ValueError("there are no answers to compare")
        delta_N = torch.cat([row.detach().double().cpu() for row in recomputed]) - torch.tensor(sampled, dtype=torch.float64)
        ratio_N, (low, high) = delta_N.exp(), RATIOS
        outside = ((ratio_N < low) | (ratio_N > high)).double().mean()
        return cls(answer_passes, len(delta_N), float(delta_N.abs().mean()), float(delta_N.abs().max()), float(outside))


@torch.no_grad()
def mismatch_by_passes(
    model: FeedbackModel,
    answers: Sequence[SampledAnswer],
    mode: str = "soft",
    feedback_passes: FeedbackPasses | None = None,
    answer_passes: Sequence[FeedbackPasses] = (0, 1, 2, "exact"),
    batch_rows: int = 16,
) -> list[Mismatch]:
    """A row for each of `answer_passes`. The log-probabilities are those before temperature and filters, as servers give them; arguments
    and errors are those of `answer_logprobs`."""
    prompts, tokens = [answer.prompt for answer in answers], [answer.tokens for answer in answers]
    found = answer_logprobs(model, prompts, tokens, mode, feedback_passes, answer_passes, batch_rows=batch_rows)
    return [Mismatch.of(passes, found[passes], answers) for passes in answer_passes]
