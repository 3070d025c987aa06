"""Each fusion by its formula; controls; only the active one has parameters; the residual entry starts without a shock."""

from types import SimpleNamespace

import pytest
import torch

from fullband.feedback.connection import Connection
from fullband.feedback.mergers import MERGERS, build_merger
from fullband.feedback_config import ConnectionConfig
from reference.seam import embed, read


def rms_norm(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.fixture
def e_and_h():
    torch.manual_seed(0)
    return 3 * torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)


def build(name):
    connection = Connection(ConnectionConfig(fusion=name), 8, 1).double()
    for weight in connection.parameters():
        torch.nn.init.normal_(weight)
    return connection, [w.detach() for w in connection.parameters()]


def residual(e, fused):
    return fused * (e.square().sum(-1, keepdim=True) / fused.square().sum(-1, keepdim=True)).sqrt()


FORMULAS = {
    "gated": lambda e, h, U, G: rms_norm((h @ U.T) * torch.sigmoid(e @ G.T)),
    "concat": lambda e, h, W: rms_norm(e @ W[:, :8].T + h @ W[:, 8:].T),
    "add": lambda e, h, W: rms_norm(e + h @ W.T),
    "residual": lambda e, h, U, G: residual(e, e + (h @ U.T) * torch.sigmoid(e @ G.T)),
    "recirculation": lambda e, h: 0.1 * h * (e.norm(dim=-1) / h.norm(dim=-1).clamp(min=1e-12))[..., None] + 0.9 * e,
}
COUNTS = {"gated": 2, "concat": 2, "add": 1, "residual": 2, "recirculation": 0}  # in units of D x D


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_and_controls(name, e_and_h):
    e, h = e_and_h
    fusion, weights = build(name)
    trunk = SimpleNamespace(input_norm=rms_norm)
    formula = FORMULAS[name]
    torch.testing.assert_close(fusion.merge(e, h, trunk), formula(e, h, *weights), rtol=0, atol=1e-9)
    fusion.control = "zeroed"
    torch.testing.assert_close(fusion.merge(e, h, trunk), formula(e, 0 * h, *weights), rtol=0, atol=1e-9)
    fusion.control = "shuffled"
    torch.testing.assert_close(fusion.merge(e, h, trunk), formula(e, h.flip(0), *weights), rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="at least two rows"):
        fusion.merge(e[:1], h[:1], trunk)
    fusion.control = "constant-gate"
    if name in ("gated", "residual"):
        weights[-1] = 0 * weights[-1]  # sigmoid(0) = one half
    torch.testing.assert_close(fusion.merge(e, h, trunk), formula(e, h, *weights), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", FORMULAS)
def test_parameters_are_the_active_fusion_alone(isometric_model, name):
    assert FORMULAS.keys() == MERGERS.keys()
    assert sum(p.numel() for p in isometric_model(name).connection.parameters()) == COUNTS[name] * 16 * 16


def test_unknown_fusion_is_refused():
    with pytest.raises(ValueError, match=r"unknown fusion 'gate' \(known: gated, "):
        build_merger("gate", 8)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_residual_entry_starts_without_a_shock(isometric_model, packed_rows, dtype):
    model = isometric_model("residual")
    model.connection.mergers[0] = build_merger("residual", 16)
    model = model.to(dtype)
    rows = packed_rows([[5, 7], [12]])
    e = embed(model.trunk, rows.tokens)
    assert torch.equal(model.connection.merge(e, torch.randn_like(e), model.trunk), e)
    place = rows.positions, rows.documents
    assert torch.equal(read(model, rows.tokens, 3, *place), read(model, rows.tokens, 0, *place))


def test_the_residual_entry_learns_from_its_start(isometric_model):
    model = isometric_model("residual")
    model.connection.mergers[0] = build_merger("residual", 16).double()
    read(model, torch.randint(23, (2, 6)), 1).sum().backward()
    assert model.connection.mergers[0].state.weight.grad.abs().max() > 1e-6


@pytest.mark.parametrize("name", FORMULAS)
def test_fused_inputs_have_the_scale_of_plain_ones(isometric_model, name):
    model = isometric_model(name)
    e = embed(model.trunk, torch.randint(23, (2, 6)))
    if name == "recirculation":
        pytest.skip("a mixture of two vectors of one norm is shorter than them")
    fused = model.connection.merge(e, 5 * torch.randn_like(e), model.trunk)
    torch.testing.assert_close(fused.square().mean(-1), e.square().mean(-1), rtol=0.2, atol=0)
