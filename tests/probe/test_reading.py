"""Each way of prefilling equals its slow definition; what is swapped at the colon moves the answer as it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fullband.model import FullBandModel
from fullband.probe.prefills import Answers, before_colon, colon_residuals, embedding_only, margins, patched_margins
from fullband.probe.probing import moved_answers
from reference.seam import embed, fused_pass, read

STEPS = {1: 1, 2: 2, 4: 5}  # 4 covers more tokens in some tokenizers
ANSWERS = Answers([], (3, 4))


@pytest.fixture
def model(isometric_model: Callable[..., FullBandModel]) -> FullBandModel:
    return isometric_model()


@pytest.fixture
def tokens_BT() -> Tensor:
    tokens = torch.randint(23, (4, 20), generator=torch.Generator().manual_seed(0))
    tokens[:, -1] = 7
    return tokens


def recurrent_suffix(model: FullBandModel, tokens_BT: Tensor, k: int) -> Tensor:
    """Top states [B, T, D] in which the last k positions are recurrent: k passes over whole rows, all else plain (law 2)."""
    plain_BT = torch.arange(tokens_BT.shape[1])[None] < tokens_BT.shape[1] - k
    states = read(model, tokens_BT)
    for _ in range(k):
        states, _ = fused_pass(model, embed(model.trunk, tokens_BT), states, plain_BT=plain_BT)
    return states


@pytest.mark.parametrize("name", ["standard", "1", "2", "4", "full"])
@torch.no_grad()
def test_each_way_of_prefilling(model: FullBandModel, tokens_BT: Tensor, name: str) -> None:
    found = {got: colon_residuals(model, colon)[1] for got, colon in before_colon(model, tokens_BT, [name], STEPS)}
    assert list(found) == [name]
    if name == "standard":
        expected = read(model, tokens_BT)
    elif name == "full":
        expected = read(model, tokens_BT, "exact")
    else:
        expected = recurrent_suffix(model, tokens_BT, STEPS[int(name)])
    torch.testing.assert_close(found[name].top_BD, expected[:, -1], rtol=0, atol=1e-10)


@torch.no_grad()
def test_all_ways_at_once_are_each_alone(model: FullBandModel, tokens_BT: Tensor) -> None:
    names = ["standard", "1", "2", "4", "full"]
    together = {name: colon_residuals(model, colon)[0] for name, colon in before_colon(model, tokens_BT, names, STEPS)}
    assert list(together) == names
    for name in names:
        (_, colon), *_ = before_colon(model, tokens_BT, [name], STEPS)
        torch.testing.assert_close(together[name], colon_residuals(model, colon)[0], rtol=0, atol=1e-10)
    apart = [(a, b) for a in names for b in names if a < b and torch.allclose(together[a], together[b])]
    assert not apart


@pytest.mark.parametrize("name", ["standard", "2"])
@torch.no_grad()
def test_standard_input_knows_nothing_and_recurrent_input_carries_the_state(model: FullBandModel, tokens_BT: Tensor, name: str) -> None:
    (_, colon), *_ = before_colon(model, tokens_BT, [name], STEPS)
    input_BD = colon_residuals(model, colon)[0][0]
    unprocessed_BD = embedding_only(model, colon, tokens_BT[:, -2])
    same = torch.allclose(input_BD, input_BD[:1].expand_as(input_BD))
    assert same == (name == "standard")
    assert torch.allclose(input_BD, unprocessed_BD) == (name == "standard")


@pytest.mark.parametrize("name", ["standard", "1", "full"])
@torch.no_grad()
def test_patching(model: FullBandModel, tokens_BT: Tensor, name: str) -> None:
    """At depth 0 a standard prefill has nothing to swap; at the last depth the answer is the partner's, whole; and at depth 0 of a
    recurrent one the carried states are what is swapped."""
    (_, colon), *_ = before_colon(model, tokens_BT, [name], STEPS)
    residual_EBD, known = colon_residuals(model, colon)
    own_B = margins(model, known, ANSWERS, colon.recurrent)
    partner_B = own_B[[1, 0, 3, 2]]
    patched = [patched_margins(model, colon, residual_BD, depth, ANSWERS) for depth, residual_BD in enumerate(residual_EBD)]
    torch.testing.assert_close(patched[-1], partner_B)
    if name == "standard":
        torch.testing.assert_close(patched[0], own_B)
    else:
        fed = colon.known.fed
        assert fed.before_BWD is not None
        other = replace(colon.known, fed=replace(fed, before_BWD=fed.before_BWD[[1, 0, 3, 2]]))
        swapped = replace(colon, known=other)
        torch.testing.assert_close(patched[0], margins(model, colon_residuals(model, swapped)[1], ANSWERS, True))
    assert not torch.allclose(patched[1], own_B) and not torch.allclose(patched[1], partner_B)


@torch.no_grad()
def test_answers_that_begin_alike_are_told_apart_behind_what_they_share(model: FullBandModel, tokens_BT: Tensor) -> None:
    (_, colon), *_ = before_colon(model, tokens_BT, ["standard"], STEPS)
    known = colon_residuals(model, colon)[1]
    longer = torch.cat([tokens_BT, torch.tensor([[5], [5], [5], [5]])], dim=1)
    logits = model.trunk.head(read(model, longer)[:, -1])
    found = margins(model, known, Answers([5], (3, 4)), recurrent=False)
    torch.testing.assert_close(found, (logits[:, 4] - logits[:, 3]).float())


@pytest.mark.parametrize(
    ("patched", "expected"),
    [([-2.0, 2.0, 1.0, 1.0], (0.0, 0.0)), ([2.0, -2.0, 1.0, 1.0], (1.0, 1.0)), ([2.0, 2.0, 9.0, 9.0], (0.5, 0.5))],
)
def test_moved_answers(patched: list[float], expected: tuple[Any, Any]) -> None:
    """The second pair answers alike, so it says nothing."""
    assert moved_answers(np.array([-2.0, 2.0, 1.0, 1.0]), np.array(patched)) == pytest.approx(expected)


def test_nothing_to_move() -> None:
    assert moved_answers(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == (None, None)
