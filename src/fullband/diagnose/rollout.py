"""Long rollouts: do the scale of states and inputs hold over thousands of generated tokens, and does the text fall into a loop?

Where the context is shorter than the rollout, generation slides as `generate(overflow="slide")` does: when a row has filled the context,
the last half of it is prefilled as a new prompt. That is a restart of the carried state, so it is counted and reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullband.decode import stream
from fullband.diagnose.trace import Progress
from fullband.feedback.connection import Connection
from fullband.feedback.passes import FeedbackModel
from fullband.trunk.protocol import Trunk, TrunkOutput

POINTS = 128  # of the curves of scale over a rollout
NGRAM = 4


@dataclass(frozen=True)
class Loop:
    """The text of a row ends in a loop: `period` tokens, repeated from token `start` of the new text to its end."""

    row: int
    period: int
    start: int


@dataclass(frozen=True)
class LongRollout:
    """`tokens` new tokens of `rows` rows, from prompts of `prompt` tokens.

    temperature    0 = the most likely token
    restarts       times that a row's last half context was prefilled anew; 0 = the context held the whole rollout
    places         numbers of the new tokens that the curves are for; each point is a mean since the one before
    state_rms      root mean square of the elements of top states;  input_rms  of what the stack is fed
    drift_state/_input  the last tenth over the first tenth
    distinct       share of different 4-grams among all of a row's, the mean over rows: low = it repeats itself
    loops          rows that end in a loop
    """

    mode: str
    temperature: float
    rows: int
    prompt: int
    tokens: int
    restarts: int
    places: list[int]
    state_rms: list[float]
    input_rms: list[float]
    drift_state: float
    drift_input: float
    distinct: float
    loops: list[Loop]


class _Watched:
    """A trunk that notes the scale of its inputs and top states where it runs one token a row, and counts the prompts it runs."""

    def __init__(self, trunk: Trunk):
        self._trunk = trunk
        self.input_rms: list[Tensor] = []
        self.state_rms: list[Tensor] = []
        self.prompts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def above(self, x_BTD: Tensor, *others: Any) -> TrunkOutput:
        output = self._trunk.above(x_BTD, *others)
        if x_BTD.shape[1] == 1:
            self.input_rms.append(_rms(x_BTD))
            self.state_rms.append(_rms(output.top_BTD))
        else:
            self.prompts += 1
        return output


@dataclass(frozen=True)
class _Model:
    trunk: Any
    connection: Connection


def roll_out(
    model: FeedbackModel,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    mode: str = "soft",
    progress: Progress | None = None,
) -> LongRollout:
    """Generate `tokens` tokens (at least 2: the last one is not run) after prompts of one length (at least 2), whatever stop ids there
    are.

    Raises ValueError as `stream`, for fewer tokens, and for prompts of different lengths or of a single token.
    """
    check_rollout(tokens)
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) != 1 or min(lengths) < 2:
        raise ValueError(f"a rollout takes prompts of one length of at least 2 tokens, not of {sorted(lengths)}")
    watched = _Watched(model.trunk)
    texts: list[list[int]] = [[] for _ in prompts]
    steps = stream(
        _Model(watched, model.connection),
        prompts,
        mode,
        max_new_tokens=tokens,
        temperature=temperature,
        seed=seed,
        overflow="slide",
    )
    read_at_first = watched.prompts
    for made, step in enumerate(steps, start=1):
        for row, token in step.tokens.items():
            texts[row].append(token)
        if progress is not None:
            progress(made, tokens)
    states, inputs = torch.stack(watched.state_rms).tolist(), torch.stack(watched.input_rms).tolist()
    places, state_curve = _curve(states)
    return LongRollout(
        mode=mode,
        temperature=temperature,
        rows=len(prompts),
        prompt=lengths.pop(),
        tokens=tokens,
        restarts=watched.prompts - read_at_first,
        places=places,
        state_rms=state_curve,
        input_rms=_curve(inputs)[1],
        drift_state=_drift(states),
        drift_input=_drift(inputs),
        distinct=sum(distinct_ngrams(text) for text in texts) / len(texts),
        loops=[Loop(row, *loop) for row, text in enumerate(texts) if (loop := ending_loop(text)) is not None],
    )


def check_rollout(tokens: int) -> None:
    """Raises ValueError for a rollout that would run none of its tokens."""
    if tokens < 2:
        raise ValueError(f"a rollout must have at least 2 tokens (the last one is not run), got {tokens}")


def distinct_ngrams(tokens: Sequence[int]) -> float:
    """Different 4-grams over all 4-grams; 1 for a text too short to repeat one."""
    grams = Counter(zip(*(tokens[i:] for i in range(NGRAM)), strict=False))
    return len(grams) / grams.total() if grams else 1.0


def ending_loop(tokens: Sequence[int]) -> tuple[int, int] | None:
    """(period, start) of the loop that a text ends in: its last part repeats the same `period` tokens, at least three times and over at
    least 32 tokens. The shortest period; None if there is none."""
    length = len(tokens)
    for period in range(1, length // 3 + 1):
        start = length - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if length - start >= max(3 * period, 32):
            return period, start
    return None


def _rms(values: Tensor) -> Tensor:
    return values.float().square().mean().sqrt()


def _curve(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """(numbers of the last token of each part, means of the parts)."""
    ends = sorted({round((i + 1) * len(values) / POINTS) for i in range(POINTS)} - {0})
    return ends, [sum(values[a:b]) / (b - a) for a, b in zip([0, *ends], ends, strict=False)]


def _drift(values: Sequence[float]) -> float:
    tenth = max(1, len(values) // 10)
    return sum(values[-tenth:]) / max(sum(values[:tenth]), 1e-30)
