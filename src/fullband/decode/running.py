"""The sequences that are being decoded: one batch, and one more for those that slid over the end of the context together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullband.decode.modes import Mode, step
from fullband.decode.options import kept_of
from fullband.decode.prefill import prefill
from fullband.decode.sampling import History
from fullband.decode.speculate import LookAhead, Speculation, SpeculationReport
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.state import DecodeState


@dataclass(frozen=True)
class _Batch:
    """Rows with one decode state; `places_M` are their places among all rows, ascending; every row has room for `room` tokens more.

    With self-speculation every row is a batch of its own, and `ahead` runs its tokens.
    """

    state: DecodeState
    places_M: Tensor
    room: int
    ahead: LookAhead | None = None


class RunningBatch:
    """Decode states of N rows.

    Rows that fill the context at the same step are prefilled again together and make a batch of their own, so that a row's numbers never
    depend on when its neighbours slide. Without sliding there is one batch.
    """

    def __init__(
        self,
        model: FeedbackModel,
        mode: Mode,
        state: DecodeState,
        chunk: int | None,
        speculation: Speculation | None,
        texts_NT: Tensor,
        report: SpeculationReport,
    ):
        """`texts_NT` is the rows' texts, as far as they are known, -1 in padding: where speculation looks for its drafts.
        It keeps `report` up to date."""
        self._model, self._mode, self._chunk, self._speculation = model, mode, chunk, speculation
        self._report = report
        places = torch.arange(state.top_BD.shape[0], device=state.top_BD.device)
        self._batches = [_Batch(state, places, self._room(state))]
        if speculation is not None:
            self._batches = self._apart(self._batches[0], texts_NT)

    @property
    def top_ND(self) -> Tensor:
        """Last top state of every row."""
        if len(self._batches) == 1:
            return self._batches[0].state.top_BD
        tops = torch.cat([batch.state.top_BD for batch in self._batches])
        return torch.empty_like(tops).index_copy_(0, torch.cat([batch.places_M for batch in self._batches]), tops)

    def select(self, kept_N: Tensor) -> None:
        """Only the rows at the given places, in ascending order, stay."""
        places = torch.cat([batch.places_M for batch in self._batches])
        moved = torch.full_like(places, -1)
        moved[kept_N] = torch.arange(len(kept_N), device=places.device)
        parts = [_part(batch, moved[batch.places_M] >= 0) for batch in self._batches]
        self._batches = [replace(part, places_M=moved[part.places_M]) for part in parts if part is not None]

    def feed(self, tokens_N: Tensor, history: History | None) -> None:
        """Runs a token of each row. `history` has all tokens so far, these included; needed where rows may slide."""
        going_on: list[_Batch] = []
        slid: list[_Batch] = []
        for batch in self._batches:
            if batch.room > 0:
                going_on.append(batch)
                continue
            full_M = batch.state.positions_B >= self._model.trunk.context  # none, if the longest row has left since the room was counted
            if bool(full_M.any()):
                assert history is not None
                again = self._prefill_again(batch.places_M[full_M], history.tokens_NT)
                slid += [again] if self._speculation is None else self._apart(again, history.tokens_NT[again.places_M])
            left = _part(batch, ~full_M)
            if left is not None:
                going_on.append(replace(left, room=self._room(left.state)))
        self._batches = [self._step(batch, tokens_N) for batch in going_on] + slid

    def _apart(self, batch: _Batch, texts_MT: Tensor) -> list[_Batch]:
        """Each row by itself, with its own look-ahead."""
        assert self._speculation is not None
        apart = []
        for row, text in enumerate(texts_MT.tolist()):
            one = torch.tensor([row], device=batch.places_M.device)
            known = [token for token in text if token >= 0]
            ahead = LookAhead(self._model, self._mode, self._speculation, known, self._report)
            apart.append(_Batch(batch.state.select(one), batch.places_M[one], batch.room, ahead))
        return apart

    def _step(self, batch: _Batch, tokens_N: Tensor) -> _Batch:
        tokens_M = tokens_N if len(batch.places_M) == len(tokens_N) else tokens_N[batch.places_M]
        if batch.ahead is not None:
            return replace(batch, state=batch.ahead.feed(batch.state, int(tokens_M)), room=batch.room - 1)
        return replace(batch, state=step(self._model, batch.state, tokens_M, self._mode), room=batch.room - 1)

    def _prefill_again(self, places_M: Tensor, texts_NT: Tensor) -> _Batch:
        """The rows at these places, their last half context as a new prompt."""
        tokens_MT = texts_NT[places_M, -kept_of(self._model.trunk.context) :]
        state = prefill(self._model, tokens_MT, self._mode.feedback_passes, self._chunk)
        return _Batch(state, places_M, self._room(state))

    def _room(self, state: DecodeState) -> int:
        return self._model.trunk.context - int(state.positions_B.max())


def _part(batch: _Batch, chosen_M: Tensor) -> _Batch | None:
    """The chosen rows (bool [M]) of a batch, None if there are none."""
    rows = chosen_M.nonzero()[:, 0]
    if len(rows) == len(chosen_M):
        return batch
    return replace(batch, state=batch.state.select(rows), places_M=batch.places_M[rows]) if len(rows) else None
