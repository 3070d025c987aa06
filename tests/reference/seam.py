"""The seam as tests call it, where the stack is entered at its input: loose positions, documents and masks, top states alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fullband.feedback import by_passes, passes
from fullband.feedback.converged import ConvergedReport, run_converged
from fullband.feedback_config import FeedbackPasses
from fullband.layout import Layout
from fullband.trunk.residual import runs_watched


def embed(trunk: Any, tokens: Tensor) -> Tensor:
    """What the stack gets of tokens without feedback."""
    return trunk.below(tokens).x_BTD


def run_trunk(
    trunk: Any, inputs: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, cache: Any = None, keep: Any = "none"
) -> tuple[Tensor, Any]:
    if documents is not None and positions is None:  # slots count on from the cache
        first = 0 if cache is None else cache.length
        positions = torch.arange(first, first + inputs.shape[1])[None].expand(inputs.shape[:2])
    output = trunk.above(inputs, Layout(positions, documents), cache, keep)
    return output.top_BTD, output.cache


def lengths_run(trunk: Any) -> list[int]:
    """Grows by the number of positions of every run of the trunk from now on."""
    seen: list[int] = []
    watching = runs_watched(trunk, lambda x: seen.append(x.shape[1]))
    watching.__enter__()
    trunk.watching = watching  # as long as the trunk lives
    return seen


def fused_pass(
    model: Any,
    inputs: Tensor,
    previous: Tensor,
    boundary: Tensor | None = None,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    cache: Any = None,
    keep: Any = "none",
    plain_BT: Tensor | None = None,
    noise_BTD: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """`boundary` is the state [B, D] before the first position."""
    entering = passes.Inputs(inputs, Layout(positions, documents, plain_BT))
    before = None if boundary is None else boundary[:, None]
    output = passes.fused_pass(model, entering, previous, before, cache, keep, noise_BTD)
    return output.top_BTD, output.cache


def read(
    model: Any,
    tokens: Tensor,
    feedback_passes: FeedbackPasses = 0,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    plain_BT: Tensor | None = None,
) -> Tensor:
    """Top states after these feedback passes."""
    return by_passes.top_states(model, tokens, feedback_passes, Layout(positions, documents, plain_BT))


def iterate(
    model: Any, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, plain_BT: Tensor | None = None
) -> Iterator[Tensor]:
    """Top states of pass 1, 2, 3, … without end."""
    return by_passes.iterate_passes(model, passes.below(model, tokens, Layout(positions, documents, plain_BT))[0])


def read_converged(
    model: Any,
    tokens: Tensor,
    lengths: Tensor | None = None,
    tolerance: float = 1e-3,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Any, ConvergedReport]:
    """(top states, cache, report)."""
    inputs, _ = passes.below(model, tokens, Layout(positions, documents))
    found = run_converged(model, inputs, lengths, tolerance, **settings)
    return found.top_BTD, found.cache, found.report
