"""Do the states settle when passes are repeated? (Fig. 3, and the adaptive schedule.)

A change travels at least one position a pass: position t (counted from 0) is final after t + 1 passes whatever the model, so only
positions the wavefront has not reached (t ≥ k) tell whether the map contracts, and only rows of at least twice as many positions
as passes hold enough of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fullband.feedback.passes import FeedbackModel, iterate_passes

FLOOR = 1e-5  # relative change below which rounding, not the map, decides


@dataclass(frozen=True)
class Settling:
    """What repeated passes did past the wavefront.

    relative_change   median over positions of ‖h^(k) - h^(k-1)‖ / ‖h^(k)‖, for k = 2, 3, …
    ratio_median/p99  over positions, of the geometric mean change ratio a pass: below 1 the change shrinks
    passes_needed     first k whose 99th percentile of relative change is below `tolerance`; None = not reached
    measurable        whether rows were long enough to see past the wavefront
    """

    relative_change: list[float]
    ratio_median: float
    ratio_p99: float
    passes_needed: int | None
    tolerance: float
    measurable: bool

    def settled(self, ratio: float) -> bool:
        """States reach the tolerance, or both median and 99th percentile of the change ratio stay below `ratio`."""
        return self.passes_needed is not None or (self.ratio_median < ratio and self.ratio_p99 < ratio)


@torch.no_grad()
def measure_settling(
    model: FeedbackModel,
    tokens_BT: Tensor,
    passes: int,
    tolerance: float = 1e-2,
    positions_BT: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> Settling:
    """Runs `passes` (≥ 3) passes without gradients. Raises ValueError for fewer: a ratio needs two changes."""
    if passes < 3:
        raise ValueError(f"measuring a change ratio takes at least 3 passes, not {passes}")
    depth_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand(tokens_BT.shape) if positions_BT is None else positions_BT
    if documents_BT is not None:
        depth_BT = depth_BT.where(documents_BT >= 0, -1)  # padding measures nothing
    ahead = depth_BT >= passes
    changes = []
    previous: Tensor | None = None
    for states in islice(iterate_passes(model, tokens_BT, positions_BT, documents_BT), passes):
        if previous is not None:
            changes.append((states - previous).norm(dim=-1)[ahead].float() / states.norm(dim=-1)[ahead].float())
        previous = states
    if not bool((depth_BT >= 2 * passes - 1).any()):
        return Settling([], float("nan"), float("nan"), None, tolerance, measurable=False)
    change_KN = torch.stack(changes)
    ratios = _mean_ratio(change_KN)
    settled_at = (torch.quantile(change_KN, 0.99, dim=1) < tolerance).nonzero()
    return Settling(
        relative_change=change_KN.median(dim=1).values.tolist(),
        ratio_median=float(ratios.median()),
        ratio_p99=float(torch.quantile(ratios, 0.99)),
        passes_needed=int(settled_at[0]) + 2 if len(settled_at) else None,
        tolerance=tolerance,
        measurable=True,
    )


def _mean_ratio(change_KN: Tensor) -> Tensor:
    """Geometric mean of the change ratios of each position [N], over the passes before its change drops to rounding."""
    above = (change_KN > FLOOR).cumprod(dim=0)
    steps = (above.sum(dim=0) - 1).clamp(min=1)
    last = change_KN.gather(0, steps[None].clamp(max=change_KN.shape[0] - 1))[0]
    return (last.clamp(min=FLOOR) / change_KN[0].clamp(min=FLOOR)) ** (1.0 / steps)
