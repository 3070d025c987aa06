"""The depths that are asked for are those of the whole probe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fullband.config import TrunkConfig
from fullband.data.tokenizers import ProgramTokenizer
from fullband.model import FullBandModel
from fullband.probe import probing
from fullband.probe.probing import plan_probe, run_probe

pytest.importorskip("sklearn")


@pytest.fixture
def model() -> FullBandModel:
    torch.manual_seed(0)
    shape = dict(width=16, layers=2, heads=2, kv_heads=1, glu_width=16, context=200, window=64, full_every=2)
    return FullBandModel(TrunkConfig(vocab_size=ProgramTokenizer().vocab_size, **shape)).eval()


def test_some_depths_are_those_of_all(model: FullBandModel, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_short(monkeypatch)
    tokenizer = ProgramTokenizer()
    whole, part = (
        run_probe(model, plan_probe(model, tokenizer, ["registers"], ["standard", "full"], groups=4, depths=depths))
        for depths in (None, [2, 0])
    )
    assert (whole.depths, part.depths) == (3, 2)
    for all_depths, some in zip(whole.settings, part.settings, strict=True):
        for every, chosen in zip(all_depths.prefills, some.prefills, strict=True):
            assert chosen.depths == [every.depths[0], every.depths[2]]
            assert (chosen.answered, chosen.embedding_only) == (every.answered, every.embedding_only)


@pytest.mark.parametrize("depths", [[], [3], [-1, 0]])
def test_depths_that_there_are_not(model: FullBandModel, depths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"depths are of 0 \(the input\) to 2, not"):
        plan_probe(model, ProgramTokenizer(), ["registers"], groups=4, depths=depths)


def _only_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting of 180 tokens, so that reading it token by token takes a moment."""

    build: Callable[..., list] = probing.build_settings
    monkeypatch.setattr(probing, "build_settings", lambda *arguments: build(*arguments)[1:2])
