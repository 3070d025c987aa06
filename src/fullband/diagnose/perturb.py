"""Response to a perturbation of size σ: does a nudge die out, along the row and from pass to pass?

Two questions with two answers. Along positions the text is evaluated exactly, once as it is and once with noise on one carried state: the
distance afterwards is how long a decoder remembers an error. Over passes all states of the plain pass are nudged: the distance past the
wavefront is what further passes make of it. σ is relative: the noise has σ times the norm of the state it is added to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from fullband.data.batch import Batch
from fullband.decode import prefill, resolve_mode, step
from fullband.feedback.passes import FeedbackModel, below, parallel, plain_pass
from fullband.trunk.pointwise import lengths

FLOOR = 1e-5  # relative distance at which rounding takes over


@dataclass(frozen=True)
class Response:
    """Mean relative distance ‖h' - h‖ / ‖h‖ after 0, 1, 2, … positions or passes (0 = the nudge itself), and the geometric mean factor
    by which it grew in each of them, as long as it was above rounding; NaN where it was not finite to begin with."""

    distance: list[float]
    growth: float


@dataclass(frozen=True)
class Perturbation:
    """`position` is where the state that was nudged for `along_positions` stands; `passes` is None where rows are too short to look
    past the wavefront."""

    sigma: float
    position: int
    along_positions: Response
    over_passes: Response | None


@torch.no_grad()
def perturb(model: FeedbackModel, batch: Batch, sigma: float, passes: int = 16, positions: int = 64, seed: int = 0) -> Perturbation:
    """Nudge rows of one document each, by relative noise σ > 0.

    passes, positions   how far the response is followed, as rows allow
    Raises ValueError for another σ, and for rows shorter than 4.
    """
    length = batch.shape[1]
    if not sigma > 0 or not math.isfinite(sigma):
        raise ValueError(f"the size of a perturbation is a number above 0, not {sigma}")
    if length < 4:
        raise ValueError(f"a perturbation is followed over rows of at least 4 positions, not {length}")
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = batch.tokens.to(model.trunk.device)
    at = length // 4
    along = _along_positions(model, tokens_BT[:, : at + 1 + positions], at, sigma, generator)
    measurable = min(passes, length // 2 - 1)
    over = _over_passes(model, tokens_BT, measurable, sigma, generator) if measurable >= 2 else None
    return Perturbation(sigma, at, _response(along), None if over is None else _response(over))


def _along_positions(model: FeedbackModel, tokens_BT: Tensor, at: int, sigma: float, generator: torch.Generator) -> list[float]:
    """The state of position `at` is nudged, after exact evaluation up to it; the text goes on as it is."""
    clean = prefill(model, tokens_BT[:, : at + 1], "exact")
    assert clean.fed.before_BWD is not None
    nudged = replace(clean, top_BD=_nudge(clean.top_BD, sigma, generator))
    nudged = replace(nudged, fed=replace(clean.fed, before_BWD=nudged.top_BD[:, None])).fork()
    distances, mode = [_distance(nudged.top_BD, clean.top_BD)], resolve_mode("soft")
    for t in range(at + 1, tokens_BT.shape[1]):
        clean, nudged = (step(model, state, tokens_BT[:, t], mode) for state in (clean, nudged))
        distances.append(_distance(nudged.top_BD, clean.top_BD))
    return distances


def _over_passes(model: FeedbackModel, tokens_BT: Tensor, passes: int, sigma: float, generator: torch.Generator) -> list[float]:
    inputs, _ = below(model, tokens_BT)
    first = plain_pass(model, inputs)
    nudged_first = first._replace(states_BTD=_nudge(first.states_BTD, sigma, generator))
    runs = [parallel(model, inputs, start) for start in (first, nudged_first)]
    past = slice(passes + 1, None)
    distances = [_distance(nudged_first.states_BTD[:, past], first.states_BTD[:, past])]
    for clean, nudged in islice(zip(*runs, strict=True), passes):
        distances.append(_distance(nudged.states_BTD[:, past], clean.states_BTD[:, past]))
    return distances


def _nudge(states: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    precise = torch.promote_types(states.dtype, torch.float32)
    noise = torch.randn(states.shape, generator=generator, dtype=torch.float64).to(states.device, precise)
    return (states.to(precise) + sigma * lengths(states)[..., None] * noise / lengths(noise)[..., None]).to(states.dtype)


def _distance(found: Tensor, clean: Tensor) -> float:
    """In float64: the square of a large distance is not finite before."""
    norms = clean.double().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((found.double() - clean.double()).norm(dim=-1) / norms).mean())


def _response(distances: list[float]) -> Response:
    above = next((n for n, distance in enumerate(distances) if distance <= FLOOR), len(distances) - 1)
    if not math.isfinite(distances[0]):
        return Response(distances, math.nan)
    growth = (max(distances[above], FLOOR) / max(distances[0], FLOOR)) ** (1 / above) if above else 0.0
    return Response(distances, growth)
