"""Converged passes: passes over a sliding window that commits positions once their states stop moving.

A pass over whole sequences computes again what has settled long ago and what cannot settle yet. Here a pass covers only a window after
the last committed position. A position enters it without feedback, is refined by every pass, and is committed (its keys and values stay,
its state is carried to the next position) when it and all before it moved less than the tolerance. The first position of the window
depends on committed ones only, so it is exact and every pass commits at least one. Where nothing but that happens, because the task needs
one step after another (wavefront-limited), the window shrinks to one position: the recurrence is then exact, at its price.

Each sequence has its own window. Those that are ahead wait, so a sequence's states do not depend on its neighbours (law 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullband.feedback.passes import FeedbackModel, Inputs, PassOutput, fused_pass
from fullband.trunk.pointwise import lengths

WINDOW = 64  # positions in a row's window
MAX_PASSES = 16  # passes a position may take before its row goes position by position


@dataclass(frozen=True)
class ConvergedReport:
    """What converged passes did.

    passes_B             most passes that a position of the row took before it was committed (its first, plain one included)
    residual_B           largest relative change ‖h^(k) - h^(k-1)‖ / ‖h^(k)‖ at which a position of the row was committed
    exact_from_B         position from which the row went position by position because it was wavefront-limited; -1 = nowhere
    executed_positions   positions the trunk computed, over all rows, padding and waiting rows included
    """

    passes_B: Tensor
    residual_B: Tensor
    exact_from_B: Tensor
    executed_positions: int


class _Windows:
    """Where each row stands. Slots count from the first of the row; all tensors live on the model's device."""

    def __init__(self, like_BTD: Tensor, lengths_B: Tensor, window: int):
        batch, length, _ = like_BTD.shape
        device = like_BTD.device
        self.lengths_B = lengths_B
        self.slots_T = torch.arange(length, device=device)
        self.committed_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.window_B = torch.full((batch,), window, device=device)
        self.carried_BTD = torch.zeros_like(like_BTD)  # at t: the state that position t + 1 is fused with
        self.known_BT = torch.zeros(batch, length, dtype=torch.bool, device=device)  # carried_BTD[t] holds a state
        self.passes_BT = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.states_BTD, self.top_BTD = torch.zeros_like(like_BTD), torch.zeros_like(like_BTD)
        self.residual_B = torch.zeros(batch, dtype=torch.promote_types(like_BTD.dtype, torch.float32), device=device)
        self.exact_from_B = torch.full((batch,), -1, device=device)

    @property
    def unfinished_B(self) -> Tensor:
        return self.committed_B < self.lengths_B

    def window_ends(self) -> Tensor:
        return torch.minimum(self.committed_B + self.window_B, self.lengths_B)

    def plain_BT(self) -> Tensor:
        """Positions whose predecessor has no state yet enter plain."""
        return torch.cat([torch.ones_like(self.known_BT[:, :1]), ~self.known_BT[:, :-1]], dim=1)

    def take(self, start: int, output: PassOutput, tolerance: float, max_passes: int) -> None:
        """Take over a pass over the slots from `start` on: commit what has settled, keep the rest for the next pass."""
        states_BSD = output.states_BTD
        stop = start + states_BSD.shape[1]
        slots_S = self.slots_T[start:stop]
        first_B1, ends_B1 = self.committed_B[:, None], self.window_ends()[:, None]
        takes_part_B1 = self.unfinished_B[:, None] & (ends_B1 <= stop) & (first_B1 >= start)
        inside_BS = takes_part_B1 & (slots_S >= first_B1) & (slots_S < ends_B1)
        change_BS = self._change(states_BSD, start, stop)
        settled_BS = inside_BS & ((slots_S == first_B1) | (change_BS < tolerance))
        behind_BS = slots_S < first_B1
        run_BS = (settled_BS | behind_BS).cumprod(dim=1).bool() & inside_BS  # settled, and so are all before it
        committed_B = self.committed_B + run_BS.sum(dim=1)
        keep_BS = inside_BS & (slots_S >= committed_B[:, None] - 1)
        self.carried_BTD[:, start:stop] = torch.where(keep_BS[..., None], states_BSD, self.carried_BTD[:, start:stop])
        self.states_BTD[:, start:stop] = torch.where(run_BS[..., None], states_BSD, self.states_BTD[:, start:stop])
        self.top_BTD[:, start:stop] = torch.where(run_BS[..., None], output.top_BTD, self.top_BTD[:, start:stop])
        self.known_BT[:, start:stop] |= inside_BS
        self.passes_BT[:, start:stop] += inside_BS
        moved_BS = torch.where(run_BS & (slots_S != first_B1), change_BS, 0)
        self.residual_B = torch.maximum(self.residual_B, moved_BS.amax(dim=1))
        stuck_B = (self.passes_BT[:, start:stop] * (inside_BS & ~run_BS)).amax(dim=1) >= max_passes
        self.exact_from_B = torch.where(stuck_B & (self.exact_from_B < 0), committed_B, self.exact_from_B)
        self.window_B = torch.where(stuck_B, 1, self.window_B)
        self.committed_B = committed_B

    def _change(self, states_BSD: Tensor, start: int, stop: int) -> Tensor:
        """Relative change since the pass before; infinite where there was none."""
        before = self.carried_BTD[:, start:stop]
        change = lengths(states_BSD - before) / lengths(states_BSD)
        return change.masked_fill(~self.known_BT[:, start:stop], float("inf"))


class Converged(NamedTuple):
    """Top states and carried states [B, T, D], the cache of the layers above the entry with all keys kept, and what it took."""

    top_BTD: Tensor
    states_BTD: Tensor
    cache: Any
    report: ConvergedReport


@torch.no_grad()
def run_converged(
    model: FeedbackModel,
    inputs: Inputs,
    lengths_B: Tensor | None = None,
    tolerance: float = 1e-3,
    window: int = WINDOW,
    max_passes: int = MAX_PASSES,
) -> Converged:
    """The states to which passes over sequences that begin in slot 0 converge.

    lengths_B    tokens of each sequence, padding (document -1) after them; None = all of them
    tolerance    relative change of a carried state below which it is settled
    Raises ValueError for a tolerance, window or number of passes that cannot work, for a trunk whose cache cannot be cut back, and for a
    connection that carries more than one position.
    """
    if not model.trunk.can_crop_cache:
        raise ValueError("converged passes cut the cache back, which recurrent layers cannot: use a number of feedback passes or 'exact'")
    if model.connection.window > 1:
        raise ValueError("converged passes carry one position, not a window: use a number of feedback passes or 'exact'")
    if not tolerance > 0:
        raise ValueError(f"the tolerance of converged passes must be positive, got {tolerance}")
    if window < 1 or max_passes < 2:
        raise ValueError(f"converged passes take a window of at least 1 (given: {window}) and at least 2 passes (given: {max_passes})")
    batch, length, width = inputs.x_BTD.shape
    lengths = torch.full((batch,), length, device=inputs.x_BTD.device) if lengths_B is None else lengths_B.to(inputs.x_BTD.device)
    rows = _Windows(inputs.x_BTD.new_zeros(batch, length, width), lengths, window)
    cache: Any | None = None
    start, executed = 0, 0
    while bool(rows.unfinished_B.any()):
        start = int(torch.where(rows.unfinished_B, rows.committed_B, length).min())
        stop = min(int(torch.where(rows.committed_B == start, rows.window_ends(), 0).max()) + window, int(rows.window_ends().max()))
        here = slice(start, stop)
        entering = inputs[here]
        entering = replace(entering, layout=entering.layout.with_plain(rows.plain_BT()[:, here]))
        output = fused_pass(
            model,
            entering,
            rows.carried_BTD[:, here],
            before_BWD=rows.carried_BTD[:, start - 1 : start] if start else None,
            cache=cache.rollback(start) if cache is not None else None,
            keep="all",
        )
        cache = output.cache
        executed += batch * (stop - start)
        rows.take(start, output, tolerance, max_passes)
    report = ConvergedReport(rows.passes_BT.amax(dim=1), rows.residual_B, rows.exact_from_B, executed)
    return Converged(rows.top_BTD, rows.states_BTD, cache, report)
