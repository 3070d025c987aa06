"""The decoder is App. A: equal to a loop-written reference, in whole rows, in pieces through its cache, and padded."""

import pytest
import torch

from fullband.model import FullBandModel
from fullband.presets import TRUNKS
from fullband.trunk.attention import dense_plan
from reference.decoder import decoder_states
from reference.decoder import embed as embedded
from reference.seam import embed, run_trunk


def check(model, tokens, positions=None, documents=None):
    trunk = model.trunk
    state, config = trunk.state_dict(), trunk.config
    inputs = embed(trunk, tokens)
    torch.testing.assert_close(inputs, embedded(state, config, tokens), rtol=0, atol=1e-10)
    expected = decoder_states(state, config, inputs, positions, documents)
    states, _ = run_trunk(trunk, inputs, positions, documents)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(
    "shape", [{}, {"kv_heads": 4}, {"kv_heads": 1}, {"head_dim": 6}, {"window": 1}, {"rope_base": 37.0, "norm_eps": 1e-2}]
)
def test_states_equal_the_reference(isometric_model, shape):
    check(isometric_model(**shape), torch.randint(23, (2, 11)))


@torch.no_grad()
def test_sixth_layer_is_full_and_the_seventh_slides_again(isometric_model):
    model = isometric_model(layers=7, full_every=6, window=2)
    assert model.trunk.windows == (2, 2, 2, 2, 2, None, 2)
    check(model, torch.randint(23, (1, 9)))


@torch.no_grad()
def test_documents_and_padding_on_either_side_equal_the_reference(isometric_model, packed_rows):
    rows = packed_rows([[4, 6, 1, 2], [-5, 8], [9, -4], [13]])
    check(isometric_model(), rows.tokens, rows.positions, rows.documents)


@torch.no_grad()
@pytest.mark.parametrize("keep", ["all", "window"])
@pytest.mark.parametrize("sizes", [[13], [1] * 13, [5, 1, 7], [2, 8, 1, 1, 1]])
def test_pieces_through_the_cache_equal_one_piece(isometric_model, packed_rows, keep, sizes):
    model = isometric_model(window=3)
    rows = packed_rows([[4, 6, 3], [-5, 8, -0], [13]])
    for dressed in (True, False):
        whole, _ = run_trunk(
            model.trunk, embed(model.trunk, rows.tokens), rows.positions if dressed else None, rows.documents if dressed else None
        )
        cache, parts, start = None, [], 0
        for size in sizes:
            here = slice(start, start + size)
            places, owners = (rows.positions[:, here], rows.documents[:, here]) if dressed else (None, None)
            before = None if cache is None else [layer.tensor.clone() for layer in cache.layers]
            part, longer = run_trunk(model.trunk, embed(model.trunk, rows.tokens[:, here]), places, owners, cache, keep)
            if cache is not None:
                assert all(torch.equal(a, b.tensor) for a, b in zip(before, cache.layers, strict=True)), "the cache given was changed"
            parts.append(part)
            cache, start = longer, start + size
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)


def test_gradients_through_the_cache_equal_one_piece(isometric_model, packed_rows):
    rows = packed_rows([[4, 6, 3], [13]])
    for checkpointing in (False, True):
        model = isometric_model(window=3)
        model.trunk.activation_checkpointing = checkpointing
        weight = torch.randn(2, 13, 16, dtype=torch.float64)
        e = embed(model.trunk, rows.tokens).detach().requires_grad_()
        (run_trunk(model.trunk, e, rows.positions, rows.documents)[0] * weight).sum().backward()
        expected, e.grad = e.grad, None
        first, cache = run_trunk(model.trunk, e[:, :6], rows.positions[:, :6], rows.documents[:, :6], None, "all")
        second, _ = run_trunk(model.trunk, e[:, 6:], rows.positions[:, 6:], rows.documents[:, 6:], cache)
        (torch.cat([first, second], 1) * weight).sum().backward()
        torch.testing.assert_close(e.grad, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_steps_work_in_every_precision_and_head_grouping(isometric_model, dtype):
    for kv_heads in (1, 2, 4):
        model = isometric_model(kv_heads=kv_heads).to(dtype)
        tokens = torch.randint(23, (2, 9))
        with torch.no_grad():
            whole, _ = run_trunk(model.trunk, embed(model.trunk, tokens))
            cache, parts = None, []
            for t in range(9):
                part, cache = run_trunk(model.trunk, embed(model.trunk, tokens[:, t : t + 1]), None, None, cache, "window")
                parts.append(part)
        assert whole.dtype == dtype
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.15)


@torch.no_grad()
def test_autocast_stays_near_full_precision(isometric_model):
    model = isometric_model().float()
    tokens = torch.randint(23, (2, 9))
    exact, _ = run_trunk(model.trunk, embed(model.trunk, tokens))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough, _ = run_trunk(model.trunk, embed(model.trunk, tokens))
    torch.testing.assert_close(rough.float(), exact, rtol=0, atol=0.15)


@torch.no_grad()
def test_a_row_does_not_see_its_padding(isometric_model):
    """Left- and right-padded copies give the tokens the states they have alone; no padded slot is NaN."""
    model = isometric_model()
    tokens = torch.randint(23, (1, 8))
    alone, _ = run_trunk(model.trunk, embed(model.trunk, tokens))
    for left in range(5):
        padding = torch.zeros(1, left, dtype=torch.long), torch.zeros(1, 4 - left, dtype=torch.long)
        padded = torch.cat([padding[0], tokens, padding[1]], 1)
        documents = torch.cat([padding[0] - 1, tokens * 0, padding[1] - 1], 1)
        positions = torch.cat([padding[0], torch.arange(8)[None], padding[1]], 1)
        states, _ = run_trunk(model.trunk, embed(model.trunk, padded), positions, documents)
        assert states.isfinite().all()
        torch.testing.assert_close(states[:, left : left + 8], alone, rtol=0, atol=1e-10)


def test_parameter_count_of_the_paper_model():
    """App. A by hand: about 1.1B parameters, of which fusion is two D x D matrices."""
    with torch.device("meta"):
        model = FullBandModel(TRUNKS["paper-1b"])
    V, D, L, F, H, G, d = 100_352, 1536, 24, 6656, 16, 8, 96
    attention = D * H * d + 2 * D * G * d + D * H + H * d * D + 2 * d
    block = attention + 3 * D * F + 4 * D
    trunk = V * D + L * block + 2 * D
    assert sum(p.numel() for p in model.trunk.parameters()) == trunk
    assert sum(p.numel() for p in model.connection.parameters()) == 2 * D * D
    assert [i + 1 for i, w in enumerate(model.trunk.windows) if w is None] == [6, 12, 18, 24]
    assert {w for w in model.trunk.windows if w} == {2048}


def test_initialisation_covers_every_parameter(trunk_config):
    model = FullBandModel(trunk_config())
    assert all(p.isfinite().all() for p in model.parameters())
    assert model.trunk.head_weight is model.trunk.embedding.weight


@torch.no_grad()
def test_the_plan_can_be_replaced(isometric_model):
    model = isometric_model()
    e = embed(model.trunk, torch.randint(23, (2, 11)))
    fast, _ = run_trunk(model.trunk, e)
    model.trunk.plan = dense_plan
    dense, _ = run_trunk(model.trunk, e)
    torch.testing.assert_close(fast, dense, rtol=0, atol=1e-12)
