"""Rotary positions: YaRN's frequencies and temperature are transformers' own; without it nothing changes."""

from __future__ import annotations

import math

import pytest
import torch

from fullband.config import TrunkConfig, Yarn
from fullband.trunk.decoder import Decoder
from fullband.trunk.rope import inverse_frequencies, rotary


@pytest.mark.parametrize(("factor", "original", "base"), [(4.0, 8192, 10_000.0), (2.0, 64, 10_000.0), (8.0, 2048, 500_000.0)])
@pytest.mark.parametrize("head_dim", [8, 96])
def test_yarn_is_the_one_of_transformers(trunk_config, factor: float, original: int, base: float, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=int(factor * original),
        rope_parameters={"rope_type": "yarn", "rope_theta": base, "factor": factor, "original_max_position_embeddings": original},
    )
    expected, length = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    ours = trunk_config(head_dim=head_dim, rope_base=base, rope={"factor": factor, "original": original}, context=int(factor * original))
    torch.testing.assert_close(inverse_frequencies(ours, torch.device("cpu"), torch.float32), expected, rtol=1e-6, atol=0)
    cos, sin = rotary(torch.tensor([[0, 3]]), ours, torch.float32)
    assert float(cos[0, 0, 0, 0]) == pytest.approx(length) and length == pytest.approx(1 + 0.1 * math.log(factor))
    half = head_dim // 2
    torch.testing.assert_close(sin[0, 0, 1, half:], (3 * expected).sin() * length, rtol=1e-5, atol=1e-6)
    assert torch.equal(sin[..., :half], -sin[..., half:]) and torch.equal(cos[..., :half], cos[..., half:])


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    shape = {"vocab_size": 9, "width": 96, "layers": 1, "heads": 1, "kv_heads": 1, "glu_width": 8, "window": 8}
    plain = TrunkConfig(context=8192, **shape)
    longer = TrunkConfig(context=32768, rope=Yarn(factor=4, original=8192), **shape)
    ratio = inverse_frequencies(longer, torch.device("cpu"), torch.float64) / inverse_frequencies(plain, torch.device("cpu"), torch.float64)
    turns = inverse_frequencies(plain, torch.device("cpu"), torch.float64) * 8192 / (2 * math.pi)
    assert (ratio[turns > 40] == 1).all() and torch.allclose(ratio[turns < 0.9], torch.tensor(0.25, dtype=torch.float64))
    assert (ratio.diff() <= 0).all() and len(ratio.unique()) > 4


def test_a_context_beyond_the_stretch_is_refused(trunk_config) -> None:
    with pytest.raises(ValueError, match=r"context \(300\) is longer than rope's factor x original \(256\)"):
        trunk_config(rope={"factor": 4, "original": 64}, context=300)


def test_the_decoder_reads_with_its_own_positions(trunk_config) -> None:
    """The same weights with another base or with YaRN give other states, from the second position on."""
    torch.manual_seed(0)
    plain = Decoder(trunk_config())
    tokens = torch.arange(10)[None]
    states = plain.above(plain.below(tokens).x_BTD).top_BTD
    for changes in ({"rope_base": 500_000.0}, {"rope": {"factor": 4, "original": 32}}):
        other = Decoder(trunk_config(**changes))
        other.load_state_dict(plain.state_dict())
        found = other.above(other.below(tokens).x_BTD).top_BTD
        torch.testing.assert_close(found[:, 0], states[:, 0])
        assert not torch.allclose(found[:, 1:], states[:, 1:], atol=1e-4)


@pytest.mark.parametrize("base", [1.001, 1e15])
@pytest.mark.parametrize("turns", [(1e-6, 1e-6), (1e6, 1e-6), (1e6, 1e6)])
@pytest.mark.parametrize(("factor", "original"), [(1e6, 2), (1 + 1e-9, 2**31), (1e6, 2**31)])
def test_every_yarn_that_a_recipe_may_name_has_frequencies(base: float, turns: tuple[float, float], factor: float, original: int) -> None:
    shape = {"vocab_size": 9, "width": 8, "layers": 1, "heads": 1, "kv_heads": 1, "glu_width": 8, "window": 8, "context": 2}
    yarn = Yarn(factor=factor, original=original, beta_fast=turns[0], beta_slow=turns[1])
    found = inverse_frequencies(TrunkConfig(rope_base=base, rope=yarn, **shape), torch.device("cpu"), torch.float32)
    assert found.isfinite().all() and (found > 0).all()


@pytest.mark.parametrize(("key", "value"), [("beta_slow", 40.0), ("beta_fast", 0.5), ("beta_slow", 5e-324), ("beta_fast", 1e-300)])
def test_turns_that_make_no_ramp_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"beta_slow \(\S+\) must not be above beta_fast|greater than or equal to"):
        Yarn.model_validate({"factor": 4, "original": 64, key: value})
