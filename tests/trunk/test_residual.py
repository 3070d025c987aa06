"""Hooks see the residual stream at every depth, and what they put in its place is what the trunk goes on with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fullband.model import FullBandModel
from fullband.trunk.residual import residuals, watched
from reference.seam import embed, run_trunk


@pytest.fixture
def model(isometric_model: Callable[..., FullBandModel]) -> FullBandModel:
    return isometric_model()


@pytest.fixture
def tokens_BT() -> Tensor:
    return torch.randint(23, (4, 20), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_depths_run_from_the_input_to_the_last_layer(model: FullBandModel, tokens_BT: Tensor) -> None:
    inputs = embed(model.trunk, tokens_BT)
    with residuals(model.trunk) as seen:
        states, _ = run_trunk(model.trunk, inputs)
    assert len(seen) == len(model.trunk.layers) + 1 and all(len(at_depth) == 1 for at_depth in seen)
    torch.testing.assert_close(seen[0][0], inputs)
    torch.testing.assert_close(model.trunk.final_norm(seen[-1][0]), states)
    run_trunk(model.trunk, inputs)
    assert len(seen[0]) == 1, "the hooks are gone"


def test_depths_are_the_same_with_gradients(model: FullBandModel, tokens_BT: Tensor) -> None:
    with residuals(model.trunk) as seen:
        run_trunk(model.trunk, embed(model.trunk, tokens_BT))
        with torch.no_grad():
            run_trunk(model.trunk, embed(model.trunk, tokens_BT))
    for with_gradients, without in seen:
        torch.testing.assert_close(with_gradients, without)


def test_a_depth_that_is_not_there(model: FullBandModel) -> None:
    with pytest.raises(ValueError, match="depth 4 is outside this trunk's 0 … 3"), watched(model.trunk, 4, lambda _: None):
        pass


@torch.no_grad()
def test_what_a_look_returns_takes_the_streams_place(model: FullBandModel, tokens_BT: Tensor) -> None:
    inputs = embed(model.trunk, tokens_BT)
    expected, _ = run_trunk(model.trunk, inputs.flip(0))
    for depth in range(len(model.trunk.layers) + 1):
        with residuals(model.trunk) as seen, watched(model.trunk, depth, lambda stream: stream.flip(0)):
            states, _ = run_trunk(model.trunk, inputs)
        torch.testing.assert_close(states, expected)  # rows know nothing of each other, so it does not matter where they change places
        assert torch.equal(seen[0][0], inputs)
