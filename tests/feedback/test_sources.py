"""Other states than the top one are fed back: the head still reads the top state, and everything else goes as it does for the top state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullband import costs
from fullband.decode import prefill, resolve_mode, step
from fullband.decode.static import StaticStepper
from fullband.feedback.loss import multipass_loss
from fullband.feedback.multipass import Jitter, multipass, multipass_reference
from fullband.layout import Layout
from fullband.model import FullBandModel
from fullband.optim.groups import parameter_groups
from fullband.trunk.residual import residuals
from reference.seam import embed, read, read_converged, run_trunk

OTHERS = ["middle", "first", "mix"]
Make = Callable[..., FullBandModel]


@pytest.fixture
def made(isometric_model: Make) -> Make:
    def make(source: str, fusion: str = "gated") -> FullBandModel:
        return isometric_model(fusion, layers=4, source=source)

    return make


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("source", OTHERS)
def test_the_head_reads_the_top_state_alone(made: Make, source: str) -> None:
    model, top, tokens = made(source), made("top"), torch.randint(23, (2, 9))
    top.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in top.state_dict()})
    states, plain = read(model, tokens), read(top, tokens)
    assert torch.equal(states, plain)
    same(model.trunk.head(states), top.trunk.head(plain))
    assert (read(model, tokens, 1) - read(top, tokens, 1))[:, 1:].norm(dim=-1).min() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("source", OTHERS)
def test_it_is_the_stream_it_is_called(made: Make, source: str) -> None:
    """Eq. 8 written as a loop over positions, the carried state taken from hooks on the layers."""
    model, tokens = made(source), torch.randint(23, (1, 6))
    inputs = embed(model.trunk, tokens[:, :1])
    for t in range(6):
        with residuals(model.trunk) as seen:
            states, _ = run_trunk(model.trunk, inputs)
        streams = torch.stack([stream[0][0, -1] for stream in seen])
        if source == "mix":
            carried = (model.connection.mix.softmax(0)[:, None] * streams).sum(0)
        else:
            carried = streams[{"first": 1, "middle": 2}[source]]
        carried = carried / (carried.square().mean() + model.config.trunk.norm_eps).sqrt()
        if t < 5:
            token = embed(model.trunk, tokens[:, t + 1 : t + 2])
            fused = (model.connection.mergers[0].state(carried) * torch.sigmoid(model.connection.mergers[0].gate(token[0, 0])))[None, None]
            inputs = torch.cat([inputs, model.trunk.input_norm(fused)], dim=1)
    same(read(model, tokens, "exact"), states)


@pytest.mark.parametrize("fusion", ["gated", "residual"])
@pytest.mark.parametrize("source", OTHERS)
def test_law_3(made: Make, packed_rows: Any, source: str, fusion: str) -> None:
    model, rows = made(source, fusion), packed_rows([[9, 3], [12], [4, 8]])
    found = []
    for compute in (multipass, multipass_reference):
        model.zero_grad()
        jitter = Jitter(0.1, seed=3, step=11, rows=torch.arange(3))
        outputs = compute(model, rows.tokens, [2, 7], Layout(rows.positions, rows.documents), jitter)
        loss = multipass_loss(outputs, model.trunk.head_weight, rows.targets, 20.0, 0.7, 0.1).objective
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) == 1 + len(list(model.parameters()))
    for one, other in zip(*found, strict=True):
        same(one, other)
    if source == "mix":
        assert model.connection.mix.grad.abs().max() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize("source", OTHERS)
def test_decoding_equals_reading_again(made: Make, source: str) -> None:
    model, tokens = made(source), torch.randint(23, (2, 12))
    mode = resolve_mode("fused", "exact")
    exact = read(model, tokens, "exact")
    state = prefill(model, tokens[:, :7].tolist(), "exact")
    stepper = StaticStepper(model, state, 12, mode)
    for t in range(7, 12):
        state = step(model, state, tokens[:, t], mode)
        same(state.top_BD, exact[:, t])
        same(stepper(tokens[:, t]), exact[:, t])
    same(prefill(model, tokens.tolist(), 2, chunk=5).top_BD, read(model, tokens, 2)[:, -1])
    same(read_converged(model, tokens, tolerance=1e-12, max_passes=40)[0], exact)


@pytest.mark.parametrize("source", ["top", *OTHERS])
def test_it_is_saved_counted_and_optimised(made: Make, source: str, tmp_path: Path) -> None:
    model, tokens = made(source), torch.randint(23, (1, 5))
    model.save(tmp_path)
    loaded = FullBandModel.load(tmp_path, dtype=torch.float64)
    assert loaded.config.connection.source == source
    assert torch.equal(read(loaded, tokens, 2), read(model, tokens, 2))
    parameters = list(model.parameters())
    assert costs.count_parameters(model.config.trunk, model.config.connection).total == sum(p.numel() for p in parameters)
    grouped = [p for group in parameter_groups(model) for _, p in group.parameters]
    assert sorted(map(id, grouped)) == sorted(map(id, parameters))
