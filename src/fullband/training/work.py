"""What is left of a run: how much work its steps are, as later ones run more passes than the first."""

from __future__ import annotations

from fullband.config import TrainConfig
from fullband.costs import executed_positions
from fullband.feedback_config import FeedbackConfig
from fullband.spans import schedule_spans


class Work:
    """In plain passes over one batch.

    spans   (first step, step after the last, expected passes beyond the first)
    extra   the part of a pass beyond the first that is executed
    """

    def __init__(self, spans: list[tuple[int, int, float]], extra: float):
        self.spans, self.extra = spans, extra

    @classmethod
    def of(cls, feedback: FeedbackConfig, train: TrainConfig, length: int) -> Work:
        """Of a recipe's run over rows of `length` tokens."""
        executed = executed_positions(length, feedback, train.microbatch_rows or train.batch_rows)
        spans = [
            (first, stop, sum((k - 1) * probability for k, probability in passes.items()))
            for first, stop, passes in schedule_spans(feedback.phases, train.steps, feedback.start_step)
        ]
        return cls(spans, sum(executed) / length)

    def remaining(self, step: int) -> float:
        return sum(max(0, stop - max(first, step)) * (1 + self.extra * more) for first, stop, more in self.spans)
