"""Law 1 and the protocol: a trunk reads as its source does, whole, in pieces and padded, and never changes a cache it was given."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fullband.trunk.huggingface import HuggingFaceTrunk
from fullband.trunk.residual import residuals
from reference.seam import embed, read, run_trunk
from trunk.huggingface.families import (
    CONTEXT,
    DENSE,
    FAMILIES,
    HYBRIDS,
    SLIDING,
    WINDOW,
    Converted,
    assert_near,
    build,
    converted,
    random_tokens,
)

T = 2 * WINDOW + 4
every_family = pytest.mark.parametrize("family", FAMILIES)


def read_in_pieces(trunk: HuggingFaceTrunk, inputs: Tensor, size: int, keep: str, positions: Tensor | None = None) -> Tensor:
    cache, parts = None, []
    for start in range(0, inputs.shape[1], size):
        here = slice(start, start + size)
        part, cache = run_trunk(trunk, inputs[:, here], None if positions is None else positions[:, here], None, cache, keep)
        parts.append(part)
    return torch.cat(parts, dim=1)


@every_family
def test_plain_reading_is_the_source_bit_for_bit(family: str) -> None:
    model = Converted(build(family, dtype=torch.float32))
    trunk, tokens = model.trunk, random_tokens(3, T)
    with torch.no_grad():
        assert torch.equal(trunk.head(run_trunk(trunk, embed(trunk, tokens))[0]), trunk.lm(input_ids=tokens).logits)
        mask = torch.ones_like(tokens)
        mask[0, :5], mask[1, :1] = 0, 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        source = trunk.lm(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
        ours = trunk.head(run_trunk(trunk, embed(trunk, tokens), positions, mask - 1)[0])
    assert torch.equal(ours[mask > 0], source[mask > 0])
    torch.testing.assert_close(torch.nn.functional.linear(embed(trunk, tokens), trunk.head_weight), trunk.head(embed(trunk, tokens)))


@every_family
@pytest.mark.parametrize("keep", ["window", "all"])
def test_pieces_equal_the_whole(family: str, keep: str) -> None:
    """Pieces longer and shorter than the window, with positions per row, shared by all rows [1, T], and counted by the cache."""
    trunk, tokens = converted(family).trunk, random_tokens(2, T)
    with torch.no_grad():
        inputs = embed(trunk, tokens)
        whole = trunk.lm.base_model(input_ids=tokens).last_hidden_state
        for size, positions in ((1, None), (2, torch.arange(T)[None]), (7, torch.arange(T).repeat(2, 1)), (T, torch.arange(T)[None])):
            assert_near(read_in_pieces(trunk, inputs, size, keep, positions), whole)
        assert_near(run_trunk(trunk, inputs, torch.arange(T)[None])[0], whole)


@pytest.mark.parametrize("family", SLIDING)
def test_windows_are_the_sources(family: str) -> None:
    """What a sliding layer keeps does not change what is read; what it forgets cannot be cropped back to."""
    trunk, tokens = converted(family).trunk, random_tokens(1, 3 * WINDOW)
    with torch.no_grad():
        inputs = embed(trunk, tokens)
        _, window = run_trunk(trunk, inputs[:, : 2 * WINDOW], keep="window")
        _, everything = run_trunk(trunk, inputs[:, : 2 * WINDOW], keep="all")
        whole = trunk.lm.base_model(input_ids=tokens).last_hidden_state[:, 2 * WINDOW :]
        for cache in (window, everything, everything.trim(), everything.crop(2 * WINDOW - 1).fork()):
            assert_near(run_trunk(trunk, inputs[:, cache.length :], cache=cache)[0][:, -WINDOW:], whole)
    assert {layer.held for layer in window.layers if layer.window is not None} == {WINDOW - 1}
    assert window.bytes < everything.bytes
    with pytest.raises(ValueError, match="a sliding layer kept only slots 6 and later"):
        window.crop(WINDOW)


@every_family
def test_reading_changes_no_cache(family: str) -> None:
    """Two continuations of one cache, in turns, equal what each is alone; the cache holds what it held."""
    trunk, tokens = converted(family).trunk, random_tokens(2, T)
    other = tokens.roll(1, dims=0).flip(1)
    with torch.no_grad():
        _, cache = run_trunk(trunk, embed(trunk, tokens[:, :6]), keep="window")
        before = [tensor.clone() for layer in cache.layers for tensor in layer.tensors]
        caches, tops = [cache.fork(), cache.fork()], [[], []]
        for t in range(6, T):
            for i, row in enumerate((tokens, other)):
                top, caches[i] = run_trunk(trunk, embed(trunk, row[:, t : t + 1]), cache=caches[i], keep="window")
                tops[i].append(top)
        run_trunk(trunk, embed(trunk, other), cache=cache)  # read and forgotten
        for i, row in enumerate((tokens, other)):
            joined = torch.cat([tokens[:, :6], row[:, 6:]], dim=1)
            assert_near(torch.cat(tops[i], dim=1), trunk.lm.base_model(input_ids=joined).last_hidden_state[:, 6:])
    after = [tensor for layer in cache.layers for tensor in layer.tensors]
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))


@pytest.mark.parametrize("family", [*DENSE, "lfm2"])
def test_a_decoding_step_copies_no_keys(family: str) -> None:
    trunk, tokens = converted(family).trunk, random_tokens(1, T)
    with torch.no_grad():
        _, cache = run_trunk(trunk, embed(trunk, tokens[:, :8]), keep="all")
        _, cache = run_trunk(trunk, embed(trunk, tokens[:, 8:9]), cache=cache, keep="all")  # makes room to grow
        attention = [i for i, layer in enumerate(cache.layers) if hasattr(layer, "keys")]
        assert attention
        places = [cache.layers[i].keys.tensor.data_ptr() for i in attention]
        for t in range(9, T):
            _, cache = run_trunk(trunk, embed(trunk, tokens[:, t : t + 1]), cache=cache, keep="all")
        assert [cache.layers[i].keys.tensor.data_ptr() for i in attention] == places


@every_family
def test_rows_of_a_cache_can_be_selected_and_repeated(family: str) -> None:
    trunk, tokens = converted(family).trunk, random_tokens(3, T)
    with torch.no_grad():
        _, cache = run_trunk(trunk, embed(trunk, tokens[:, :8]), keep="window")
        for rows in (torch.tensor([2, 0, 2, 1]), torch.arange(3).repeat_interleave(2)):
            chosen = cache.select(rows) if len(rows) == 4 else cache.repeat(2)
            states, _ = run_trunk(trunk, embed(trunk, tokens[rows, 8:]), cache=chosen)
            assert_near(states, trunk.lm.base_model(input_ids=tokens[rows]).last_hidden_state[:, 8:])
    assert cache.batch == 3 and cache.length == 8


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1", "lfm2"])
def test_a_position_that_restarts_is_no_new_document_without_documents(family: str) -> None:
    """As natively: documents say what can be attended to, positions only where it stands. Whole and in pieces alike."""
    trunk, tokens = converted(family).trunk, random_tokens(1, T)
    positions = torch.cat([torch.arange(4), torch.arange(T - 4)])[None]
    with torch.no_grad():
        inputs = embed(trunk, tokens)
        whole = run_trunk(trunk, inputs, positions)[0]
        assert_near(read_in_pieces(trunk, inputs, 3, "window", positions), whole)
        moved = run_trunk(trunk, torch.cat([inputs[:, :2] + 1, inputs[:, 2:]], dim=1), positions)[0]
    assert (moved - whole)[:, 4].abs().max() > 1e-3


@every_family
def test_residual_stream(family: str) -> None:
    trunk, tokens = converted(family).trunk, random_tokens(2, 4)
    with torch.no_grad(), residuals(trunk) as seen:
        run_trunk(trunk, embed(trunk, tokens))
    depths = [streams[0] for streams in seen]
    assert len(depths) == 3 and all(stream.shape == (2, 4, 16) for stream in depths)
    assert all((a - b).abs().max() > 1e-3 for a, b in pairwise(depths))


@every_family
def test_embedding_scale_is_the_sources(family: str) -> None:
    """Fused inputs come at the root mean square that plain ones have on average, whatever the scale of what was fused."""
    trunk = converted(family).trunk
    plain = embed(trunk, torch.arange(trunk.vocab_size)).detach()
    expected = float(plain.square().mean().sqrt())
    assert trunk.calibrate() == pytest.approx(expected, rel=1e-6)
    assert trunk.calibrate(torch.tensor([[3, 4]])) == pytest.approx(float(plain[3:5].square().mean().sqrt()), rel=1e-6)
    trunk.calibrate()
    normed = trunk.input_norm(7 * torch.randn(2, 3, trunk.width, dtype=torch.float64))
    torch.testing.assert_close(normed.square().mean(-1).sqrt(), torch.full((2, 3), expected, dtype=torch.float64), rtol=1e-5, atol=0)
    assert trunk.context == CONTEXT


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", *HYBRIDS])
def test_bfloat16_and_autocast(family: str) -> None:
    """Inputs keep the dtype of the source's embeddings; the model in bfloat16, or under autocast, stays near itself in float32."""
    precise = Converted(build(family, dtype=torch.float32))
    rough = Converted(build(family, dtype=torch.bfloat16))
    tokens = random_tokens(2, T)
    with torch.no_grad():
        expected = read(precise, tokens, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            embeddings = embed(precise.trunk, tokens)
            assert precise.connection.merge(embeddings, embeddings, precise.trunk).dtype == torch.float32
            under = read(precise, tokens, 1)
        halved = read(rough, tokens, 1)
    assert halved.dtype == torch.bfloat16 and rough.trunk.input_norm(embed(rough.trunk, tokens)).dtype == torch.bfloat16
    for found in (under, halved):
        error = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.median() < 0.15, error.median()
