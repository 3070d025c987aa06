"""The three attention plans compute the same thing."""

import warnings

import pytest
import torch

from fullband.trunk.attention import attend, dense_plan, flex_plan, make_plan, tiled_plan, visible

CASES = [(16, 16), (1, 16), (7, 16), (16, 17)]  # queries at the end of the keys


def tensors(queries, keys, requires_grad=False):
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(requires_grad) for s in shapes]


def document_rows(keys, kind):
    if kind == "none":
        return None
    split = torch.arange(keys) * 3 // keys
    padded = torch.where(torch.arange(keys) < 5, -1, 0) if kind == "padded" else torch.arange(keys) * 2 // keys
    return torch.stack([split, padded])


@pytest.mark.parametrize("queries, keys", CASES)
@pytest.mark.parametrize("window", [None, 1, 3, 16, 100])
@pytest.mark.parametrize("kind", ["none", "packed", "padded"])
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["boolean", "added"])
def test_tiles_equal_dense_with_gradients(queries, keys, window, kind, dtype):
    documents = document_rows(keys, kind)
    q, k, v = tensors(queries, keys, requires_grad=True)
    weight = torch.randn(q.shape, dtype=torch.float64)
    dense = attend(q, k, v, dense_plan(queries, keys, window, documents, "cpu"))
    assert dense.isfinite().all()
    expected = torch.autograd.grad((dense * weight).sum(), (q, k, v))
    for tile in (1, 3, 4, 16, 64):
        tiled = attend(q, k, v, tiled_plan(queries, keys, window, documents, "cpu", dtype, tile))
        torch.testing.assert_close(tiled, dense, rtol=0, atol=1e-12)
        for got, want in zip(torch.autograd.grad((tiled * weight).sum(), (q, k, v)), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("queries, keys", CASES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["none", "packed", "padded"])
def test_flex_equals_dense(queries, keys, window, kind):
    documents = document_rows(keys, kind)
    q, k, v = tensors(queries, keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled flex_attention says that it is slow
        got = attend(q, k, v, flex_plan(queries, keys, window, documents, "cpu"))
    torch.testing.assert_close(got, attend(q, k, v, dense_plan(queries, keys, window, documents, "cpu")), rtol=0, atol=1e-12)


def test_dense_equals_softmax_by_hand():
    q, k, v = tensors(6, 9)
    documents = document_rows(9, "packed")
    got = attend(q, k, v, dense_plan(6, 9, 4, documents, "cpu"))
    for b in range(2):
        for head in range(4):
            for t in range(6):
                seen = [s for s in range(9) if 0 <= t + 3 - s < 4 and documents[b, s] == documents[b, t + 3]]
                shares = torch.softmax(torch.stack([q[b, head, t] @ k[b, head // 2, s] for s in seen]) / 8**0.5, 0)
                torch.testing.assert_close(got[b, head, t], shares @ v[b, head // 2, seen], rtol=0, atol=1e-12)


def test_a_tile_reads_only_the_keys_of_its_window():
    for tile in tiled_plan(64, 64, 8, None, "cpu", tile=16).tiles:
        assert tile.last - tile.first <= 16 + 7
        assert tile.last == tile.stop


@pytest.mark.parametrize("window", [None, 40])
def test_masks_of_one_document_are_one(window):
    """Reading 640 positions holds one mask for a tile, not one for each: memory grows with the length, not its square."""
    plan = tiled_plan(630, 640, window, None, "cpu", torch.float32, tile=64)
    assert len(plan.tiles) == 10
    storages = {tile.mask.untyped_storage().data_ptr(): tile.mask.untyped_storage().nbytes() for tile in plan.tiles}
    assert list(storages.values()) == [4 * 64 * (640 if window is None else 64 + 39)]


def test_no_query_is_left_without_a_key():
    documents = torch.tensor([[-1, -1, 0, 0, 1, -1, -1]])
    slots = torch.arange(7)
    assert visible(slots, slots, 2, documents).any(-1).all()


def test_the_cpu_trains_on_tiles():
    assert make_plan(512, 512, 64, None, torch.device("cpu")).block_mask is None
