"""Low precision: bf16 everywhere in decoding, int8 weights through torchao."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.nn.functional as F

from decode.cases import VOCABULARY, random_prompts
from fullband.config import TrunkConfig
from fullband.decode import generate, prefill, resolve_mode
from fullband.decode.quantize import quantize, weight_bytes
from fullband.decode.static import StaticStepper
from fullband.model import FullBandModel
from reference.seam import read


@pytest.fixture(scope="module")
def trained() -> FullBandModel:
    """Float32, taught to continue i with i + 1 after 0, 1 and 4 feedback passes: what was not taught, rounding would decide."""
    torch.manual_seed(0)
    shape = TrunkConfig(vocab_size=VOCABULARY, width=32, layers=2, heads=2, kv_heads=1, glu_width=64, context=64, window=6, full_every=2)
    model = FullBandModel(shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = sum(count_loss(model, passes) for passes in (0, 1, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture
def model(trained: FullBandModel) -> FullBandModel:
    return copy.deepcopy(trained)


def count_loss(model: FullBandModel, feedback_passes: int) -> torch.Tensor:
    tokens_BT = (torch.arange(4)[:, None] * 7 + torch.arange(13)) % VOCABULARY
    logits_BTV = model.trunk.head(read(model, tokens_BT[:, :-1], feedback_passes))
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())


def losses(model: FullBandModel) -> list[float]:
    with torch.no_grad():
        return [float(count_loss(model, passes)) for passes in (0, 1)]


@pytest.mark.parametrize("name", ["standard", "soft", "fused"])
def test_bf16(model: FullBandModel, name: str) -> None:
    half = copy.deepcopy(model).bfloat16()
    assert losses(half) == pytest.approx(losses(model), rel=0.02, abs=0.02)
    prompts = [[0, 1, 2, 3], [7, 8]]
    for padded in (prompts, prompts[:1]):
        ours, theirs = (generate(each, padded, name, max_new_tokens=9) for each in (half, model))
        agree = [a == b for row, other in zip(ours, theirs, strict=True) for a, b in zip(row.tokens, other.tokens, strict=True)]
        assert sum(agree) >= 0.75 * len(agree)  # a token that differs changes all behind it


@pytest.mark.parametrize("passes", [2, "exact", "converged"])
def test_bf16_reads_prompts_in_every_way(model: FullBandModel, passes: int | str) -> None:
    half = copy.deepcopy(model).bfloat16()
    top_BD = prefill(half, random_prompts([9, 4]), passes).top_BD  # type: ignore[arg-type]
    assert top_BD.dtype == torch.bfloat16 and not top_BD.isnan().any()
    step = StaticStepper(half, prefill(half, random_prompts([9, 4])), 20, resolve_mode("soft"))
    assert not step(torch.tensor([1, 2])).isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8(model: FullBandModel, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")
    plain = model.to(dtype)
    small = quantize(copy.deepcopy(plain))
    assert losses(small) == pytest.approx(losses(plain), rel=0.01)
    matrices = sum(p.numel() for n, p in plain.named_parameters() if p.dim() == 2 and "embedding" not in n)
    assert weight_bytes(small) < weight_bytes(plain) - matrices * (dtype.itemsize - 1) * 0.7  # scales take some of it back
    assert torch.equal(small.trunk.head_weight, plain.trunk.head_weight)
    for prompts in ([[3, 4, 5]], [[3, 4, 5], [9, 10]]):
        state = prefill(small, prompts, 1)
        top_BD = StaticStepper(small, state, 20, resolve_mode("fused"))(torch.tensor([6, 11])[: len(prompts)])
        assert top_BD.dtype == dtype and not top_BD.isnan().any()


def test_weight_bytes_counts_a_tied_matrix_once(model: FullBandModel) -> None:
    assert weight_bytes(model) == 4 * sum(p.numel() for p in model.parameters())


def test_refusals(model: FullBandModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown quantisation 'int3'"):
        quantize(model, "int3")
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"pip install 'fullband\[quantize\]'"):
        quantize(model)
