"""Self-speculation: draft by looking back, check the draft with a few parallel passes, keep what the states confirm.

In plain decoding a token waits for the state before it. But a text that repeats itself can be guessed: where the last tokens stood
before, the tokens that followed them then are the draft. The model reads it ahead (`read_ahead`), and a drafted token is kept while
it is what the model itself would have chosen from a state that is exact, or that moved less than the tolerance in the last pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import torch
import torch.nn.functional as F
from torch import Tensor

from fullband.decode.ahead import Ahead, read_ahead
from fullband.decode.modes import Mode
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.state import DecodeState

Choose = Callable[[Tensor, int], list[int]]  # (logits [n, V], number of the first of these tokens) -> the token of each row


class PromptLookup:
    """Drafts from the text itself: what followed the last occurrence of its last n tokens, the longest n first. O(1) a token."""

    def __init__(self, tokens: Sequence[int], longest: int = 3):
        self.tokens: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]  # n-gram -> where the token behind it stands
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        here = len(self.tokens)
        for size, after in enumerate(self._after, start=1):
            if here >= size:
                after[tuple(self.tokens[here - size :])] = here
        self.tokens.append(token)

    def draft(self, length: int) -> list[int]:
        """`length` tokens that may come next, going round if the text behind the match is shorter; empty if the last token is new."""
        for size in range(len(self._after), 0, -1):
            start = self._after[size - 1].get(tuple(self.tokens[-size:])) if len(self.tokens) >= size else None
            if start is not None:
                behind = self.tokens[start : start + length]
                return list(islice(cycle(behind), length))
        return []


@dataclass
class SpeculationReport:
    """What speculation did. `accepted[n]` counts the checks that kept n drafted tokens; their mean is the acceptance length."""

    checks: int = 0
    steps: int = 0  # tokens read without a draft
    passes: int = 0
    drafted: int = 0
    accepted: dict[int, int] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Drafted tokens kept by a check, on average."""
        return sum(n * count for n, count in self.accepted.items()) / max(1, self.checks)


@dataclass(frozen=True)
class Speculation:
    """Settings: drafted tokens a check, passes a check may take, and the relative change below which a state counts as exact."""

    draft_length: int = 8
    max_passes: int = 4
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if self.draft_length < 1 or self.max_passes < 1 or not self.tolerance >= 0:
            raise ValueError(f"speculation takes a draft and passes of at least 1 and a tolerance of at least 0, not {self}")


@torch.no_grad()
def speculate(
    model: FeedbackModel,
    state: DecodeState,
    prompt: Sequence[int],
    mode: Mode,
    choose: Choose,
    settings: Speculation,
    report: SpeculationReport,
) -> Iterator[tuple[int, DecodeState]]:
    """(token, a state from which it was chosen or later) behind `state`, without end, for one row.

    The tokens are those that stepping would have chosen: exactly in standard mode and where states are exact, to `settings.tolerance`
    elsewhere. `choose` must depend on its arguments alone. Raises ValueError for more than one row.
    """
    if state.top_BD.shape[0] != 1:
        raise ValueError(f"self-speculation decodes one row at a time, not {state.top_BD.shape[0]}")
    lookup = PromptLookup(prompt)
    count = 0
    token = choose(F.linear(state.top_BD, model.trunk.head_weight), count)[0]
    while True:
        yield token, state
        lookup.append(token)
        count += 1
        draft = lookup.draft(min(settings.draft_length, model.trunk.context - len(lookup.tokens)))
        block = torch.tensor([[token, *draft]], device=state.top_BD.device)
        kept, choices, ahead = _check(model, state, block, draft, mode, choose, count, settings, report)
        cache = ahead.cache.rollback(state.cache.length + kept + 1).trim()
        state = DecodeState(cache, ahead.states_BSD[:, kept], state.positions_B + kept + 1, state.documents_B)
        for token in choices[:kept]:
            yield token, state
            lookup.append(token)
            count += 1
        token = choices[kept]


def _check(
    model: FeedbackModel,
    state: DecodeState,
    block_1S: Tensor,
    draft: list[int],
    mode: Mode,
    choose: Choose,
    count: int,
    settings: Speculation,
    report: SpeculationReport,
) -> tuple[int, list[int], Ahead]:
    """(drafted tokens kept, the model's own choice behind each read token, the states): passes until the verdict cannot change.

    Token 0 of the block is chosen already; its state is exact after one pass. The draft's token i is kept if the model chooses it behind
    token i of the block, whose state must be confirmed.
    """
    for number, ahead in enumerate(read_ahead(model, state, block_1S, mode), start=1):
        choices = choose(F.linear(ahead.states_BSD[0], model.trunk.head_weight), count)
        agreed = next((i for i, token in enumerate(draft) if choices[i] != token), len(draft))
        settled = (ahead.change_BS[0] <= settings.tolerance).tolist()
        confirmed = next((i for i, ok in enumerate(settled) if not ok), len(settled))  # states 0 … confirmed - 1 hold
        if confirmed > agreed or number == settings.max_passes:
            break
    kept = min(agreed, confirmed - 1)
    report.passes += number
    if draft:
        report.checks += 1
        report.drafted += len(draft)
        report.accepted[kept] = report.accepted.get(kept, 0) + 1
    else:
        report.steps += 1
    return kept, choices, ahead
