"""Converged reading: to the tolerance the exact states, whatever the length; rows apart; exact where nothing converges."""

import pytest
import torch
from torch import nn

from reference.seam import read, read_converged


@pytest.fixture
def contracting(isometric_model):
    """A model whose feedback contracts: a residual entry that lets little of the state through."""

    def make(gain=0.3, **overrides):
        model = isometric_model("residual", context=512, **overrides)
        with torch.no_grad():
            model.connection.mergers[0].state.weight.mul_(gain)
        return model

    return make


def rows(lengths, vocabulary=23, seed=0):
    """Tokens, positions, documents [B, T] of rows padded behind."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (len(lengths), max(lengths)), generator=generator)
    slots = torch.arange(max(lengths))[None].expand(tokens.shape)
    documents = torch.where(slots < torch.tensor(lengths)[:, None], 0, -1)
    return tokens, slots.clone(), documents


@pytest.mark.parametrize("window", [1, 7, 64])
@pytest.mark.parametrize("length", [1, 9, 150])
def test_states_are_exact_to_the_tolerance(contracting, window, length):
    model, (tokens, _, _) = contracting(), rows([length, length])
    exact = read(model, tokens, "exact")
    states, cache, report = read_converged(model, tokens, tolerance=1e-7, window=window)
    assert ((states - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 3e-7
    assert cache.length == length and report.residual_B.max() < 1e-7
    assert (report.exact_from_B == -1).all()


def test_it_takes_fewer_positions_than_whole_passes(contracting):
    model, (tokens, _, _) = contracting(), rows([400])
    _, _, report = read_converged(model, tokens, tolerance=1e-3)
    assert int(report.passes_B[0]) <= 16
    assert report.executed_positions < tokens.numel() * int(report.passes_B[0])


def test_a_row_does_not_depend_on_its_neighbours(contracting):
    model = contracting()
    lengths = [120, 37, 90]
    tokens, positions, documents = rows(lengths)
    together, _, report = read_converged(model, tokens, torch.tensor(lengths), 1e-4, positions, documents, window=16)
    for row, length in enumerate(lengths):
        alone, _, its = read_converged(model, tokens[row : row + 1, :length], tolerance=1e-4, window=16)
        assert (together[row, :length] - alone[0]).abs().max() < 1e-10  # far below the tolerance: the same passes
        assert its.passes_B[0] == report.passes_B[row]
        assert torch.isclose(its.residual_B[0], report.residual_B[row], rtol=1e-6)


def test_packed_documents_stay_apart(contracting):
    model, (tokens, positions, documents) = contracting(), rows([40])
    positions[0, 15:], documents[0, 15:] = torch.arange(25), 1
    states, _, _ = read_converged(model, tokens, tolerance=1e-9, positions=positions, documents=documents)
    alone = read(model, tokens[:, 15:], "exact")
    assert (states[:, 15:] - alone).abs().max() < 1e-7


def test_it_falls_back_to_exact_where_nothing_settles(isometric_model):
    model, (tokens, _, _) = isometric_model("gated", context=512), rows([100])  # isometric and gated: changes do not shrink
    exact = read(model, tokens, "exact")
    states, _, report = read_converged(model, tokens, tolerance=1e-9, max_passes=8)
    assert 0 <= int(report.exact_from_B[0]) < 20
    assert ((states - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 1e-7
    assert report.executed_positions < 20 * 64 + 100


def test_read_offers_it(contracting):
    model, (tokens, _, _) = contracting(), rows([30])
    assert (read(model, tokens, "converged") - read(model, tokens, "exact")).norm(dim=-1).max() < 1e-2


@pytest.mark.parametrize("setting", [{"tolerance": 0.0}, {"tolerance": float("nan")}, {"window": 0}, {"max_passes": 1}])
def test_settings_that_cannot_work_are_refused(contracting, setting):
    tokens, _, _ = rows([5])
    with pytest.raises(ValueError, match=r"converged passes"):
        read_converged(contracting(), tokens, **setting)


def test_norms_are_not_trivial(contracting):
    """Guards the fixture: without feedback the states differ, so the tests above compare something."""
    model, (tokens, _, _) = contracting(), rows([50])
    assert (read(model, tokens, 0) - read(model, tokens, "exact")).norm(dim=-1).max() > 1e-2
    assert any(isinstance(m, nn.Linear) for m in model.connection.modules())
