"""Self-speculation: draft by looking back, check the draft with a few parallel passes, keep what the states confirm.

In plain decoding a token waits for the state before it. But a text that repeats itself can be guessed: where the last tokens stood
before, the tokens that followed them then are the draft. The model runs it ahead (`run_ahead`); where the next token turns out to be
the drafted one, its state is there already, if it is exact or moved less than the tolerance in the last pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch

from fullband.decode.ahead import Ahead, run_ahead
from fullband.decode.modes import Mode
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.state import DecodeState


class PromptLookup:
    """Drafts from the text itself: what followed the last occurrence of its last n tokens, the longest n first. O(1) a token."""

    def __init__(self, tokens: Sequence[int], longest: int = 3):
        self.tokens: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]  # n-gram -> where the token after it stands
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        here = len(self.tokens)
        for size, after in enumerate(self._after, start=1):
            if here >= size:
                after[tuple(self.tokens[here - size :])] = here
        self.tokens.append(token)

    def draft(self, length: int) -> list[int]:
        """`length` tokens that may come next, going round if the text after the match is shorter; empty if the last token is new."""
        for size in range(len(self._after), 0, -1):
            start = self._after[size - 1].get(tuple(self.tokens[-size:])) if len(self.tokens) >= size else None
            if start is not None:
                after = self.tokens[start : start + length]
                return list(islice(cycle(after), length))
        return []


@dataclass
class SpeculationReport:
    """What speculation did: `checks` of drafts, `steps` without one, the passes and positions both took, tokens `drafted` and `kept`."""

    checks: int = 0
    steps: int = 0
    passes: int = 0
    positions: int = 0
    drafted: int = 0
    kept: int = 0

    @property
    def acceptance_length(self) -> float:
        """Drafted tokens that a check spared a step, on average."""
        return self.kept / max(1, self.checks)


@dataclass(frozen=True)
class Speculation:
    """Settings: drafted tokens a check, passes a check may take, and the relative change below which a state counts as exact."""

    draft_length: int = 8
    max_passes: int = 4
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if self.draft_length < 1 or self.max_passes < 1 or not self.tolerance >= 0:
            raise ValueError(f"speculation takes a draft and passes of at least 1 and a tolerance of at least 0, not {self}")


class LookAhead:
    """Runs the tokens of one row, and with each the draft after it: tokens that come as drafted have then been run already.

    `feed` gives the states that stepping would give: exactly in standard mode and where states are exact, to `settings.tolerance`
    elsewhere. Whoever chooses the tokens, greedily or by sampling, does not notice the drafts.
    """

    def __init__(self, model: FeedbackModel, mode: Mode, settings: Speculation, text: Sequence[int], report: SpeculationReport):
        """`text` is the row's text so far, as far as it is known; `report` is kept up to date."""
        self._model, self._mode, self._settings, self.report = model, mode, settings, report
        self._lookup = PromptLookup(text)
        self._ahead: Ahead | None = None
        self._before: DecodeState | None = None  # where the block that was run ahead begins
        self._block: list[int] = []
        self._confirmed = 0  # tokens of the block whose states hold
        self._read = 0  # tokens of the block that the row has really made

    @torch.no_grad()
    def feed(self, state: DecodeState, token: int) -> DecodeState:
        """The state after `token`; `state` is the one that `feed` returned last, or any other at first.

        Raises ValueError for more than one row.
        """
        if state.top_BD.shape[0] != 1:
            raise ValueError(f"self-speculation decodes one row at a time, not {state.top_BD.shape[0]}")
        self._lookup.append(token)
        if self._ahead is None or self._read == self._confirmed or self._block[self._read] != token:
            self._look(state, token)
        self._read += 1
        if self._read > 1:
            self.report.kept += 1
        assert self._ahead is not None and self._before is not None
        return self._ahead.state_after(self._before, self._read, self._model.connection)

    def _look(self, state: DecodeState, token: int) -> None:
        """Run the token and a draft, in passes until what the model says of the draft cannot change, or as many as are allowed."""
        length, self._read = state.cache.length, 0
        if self._ahead is not None:  # its caches are used up: their later slots are written over
            lower = None if self._ahead.below is None else self._ahead.below.rollback(length)
            state = replace(state, fed=replace(state.fed, cache=self._ahead.cache.rollback(length)), below=lower)
        self._before = state = state.trim()
        room = self._model.trunk.context - int(state.positions_B) - 1
        self._block = [token, *self._lookup.draft(min(self._settings.draft_length, room))]
        block_1S = torch.tensor([self._block], device=state.top_BD.device)
        passes = 0
        for ahead in run_ahead(self._model, state, block_1S, self._mode):
            passes += 1
            settled = (ahead.change_BS[0] <= self._settings.tolerance).tolist()
            self._ahead, self._confirmed = ahead, next((i for i, ok in enumerate(settled) if not ok), len(settled))
            most_likely = self._model.trunk.head(ahead.top_BSD[0]).argmax(dim=-1).tolist()
            agreed = next((i for i, drafted in enumerate(self._block[1:]) if most_likely[i] != drafted), len(self._block) - 1)
            if self._confirmed > agreed or passes == self._settings.max_passes:
                break
        self.report.passes += passes
        self.report.positions += passes * len(self._block)
        self.report.checks += len(self._block) > 1
        self.report.steps += len(self._block) == 1
        self.report.drafted += len(self._block) - 1
