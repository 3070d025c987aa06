"""float16 and bfloat16, whatever the scale of the embeddings: norms are computed in float32, and so nothing overflows or vanishes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fullband.feedback.mergers import MERGERS, build_merger
from fullband.feedback.settling import state_norms
from fullband.trunk.pointwise import RMSNorm, lengths, rms_norm_reference
from reference.seam import embed, read
from trunk.huggingface.families import Converted, build, random_tokens

ERRORS = {torch.float16: 0.02, torch.bfloat16: 0.08}
low_precision = pytest.mark.parametrize("dtype", list(ERRORS), ids=str)
every_scale = pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 300.0])


def converted(fusion: str, dtype: torch.dtype, scale: float) -> Converted:
    lm = build("llama", dtype=torch.float32)
    nn.init.normal_(lm.model.embed_tokens.weight, std=scale)
    return Converted(lm.to(dtype), fusion)


@low_precision
@every_scale
@pytest.mark.parametrize("fusion", MERGERS)
@torch.no_grad()
def test_fused_inputs_keep_their_scale(fusion: str, scale: float, dtype: torch.dtype) -> None:
    model = converted(fusion, dtype, scale)
    precise = copy.deepcopy(model).double()
    embeddings = embed(model.trunk, random_tokens(2, 12))
    carried = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = model.connection.merge(embeddings, carried, model.trunk)
    expected = precise.connection.merge(embeddings.double(), carried.double(), precise.trunk)
    assert found.dtype == dtype
    error = lengths(found.double() - expected) / lengths(expected)
    assert error.median() < ERRORS[dtype], error
    assert float(found.double().square().mean().sqrt()) == pytest.approx(scale, rel=0.3)


@low_precision
@every_scale
@torch.no_grad()
def test_an_untrained_residual_entry_changes_nothing(scale: float, dtype: torch.dtype) -> None:
    model = converted("residual", dtype, scale)
    model.connection.mergers[0] = build_merger("residual", model.trunk.width).to(dtype)
    tokens = random_tokens(2, 12)
    assert torch.equal(read(model, tokens, 2), read(model, tokens, 0))
    assert torch.isfinite(read(converted("residual", dtype, scale), tokens, 2)).all()


@low_precision
def test_gradients_reach_the_fusion(dtype: torch.dtype) -> None:
    for scale in (1e-4, 300.0):
        model = converted("residual", dtype, scale)
        read(model, random_tokens(2, 6), 1).float().square().mean().backward()
        for parameter in model.connection.parameters():
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all()


@low_precision
@every_scale
def test_norms_of_ours(scale: float, dtype: torch.dtype) -> None:
    x = (scale * torch.randn(3, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    module = RMSNorm(64, 1e-12, 0.5).to(dtype)
    with torch.no_grad():
        module.weight.uniform_(0.5, 2)
    expected = rms_norm_reference(x.double(), module.weight.double() * 0.5, 1e-12)
    torch.testing.assert_close(module(x).double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    far = 100 * x.float().clamp(-3, 3).to(dtype)
    for values in (x, far):
        torch.testing.assert_close(lengths(values).double(), values.double().square().sum(-1).sqrt(), rtol=1e-6, atol=0)
    assert lengths(x).dtype == state_norms(x).dtype == torch.float32 and lengths(x.double()).dtype == torch.float64
    assert torch.isfinite(state_norms(torch.full((1, 64), 6e4, dtype=dtype))).all()  # their norm is 480,000


@torch.no_grad()
def test_float32_and_float64_are_what_they_were() -> None:
    """Published numbers: the entry's formula without any conversion."""
    for dtype in (torch.float32, torch.float64):
        model = converted("residual", torch.float32, 0.3).to(dtype)
        e = embed(model.trunk, random_tokens(2, 12))
        h = torch.randn(e.shape, dtype=dtype)
        fused = model.connection.mergers[0].combine(e, h)
        squares = [x.square().mean(-1, keepdim=True) + 1e-12 for x in (e, fused)]
        assert torch.equal(model.connection.merge(e, h, model.trunk), fused * torch.sqrt(squares[0] / squares[1]))
        normed = nn.functional.rms_norm(fused, (model.trunk.width,), eps=1e-6)
        assert torch.equal(model.trunk.input_norm(fused), normed * model.trunk.embedding_scale.to(dtype))
        assert torch.equal(lengths(fused), fused.norm(dim=-1))
