"""A prefix read once and continued many times equals prompts read whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode.cases import CONTEXT, WINDOW, random_prompts
from fullband.decode import collect, generate, prefill, prefill_after, prefill_prefix, resolve_mode, step, stream_from
from fullband.model import FullBandModel

READINGS = [0, 1, 2, "exact"]
every_reading = pytest.mark.parametrize("feedback_passes", READINGS)


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@every_reading
@pytest.mark.parametrize("before", [1, WINDOW - 2, 2 * WINDOW + 1])
@pytest.mark.parametrize("lengths", [[5], [4, 4], [1, 13, WINDOW]], ids=str)
def test_continuations_equal_whole_prompts(model: FullBandModel, feedback_passes: int | str, before: int, lengths: list[int]) -> None:
    """Tops, and what decoding makes of the caches."""
    (shared,), continuations = random_prompts([before]), random_prompts(lengths, seed=1)
    new = torch.tensor(random_prompts([WINDOW + 2] * len(lengths), seed=2)).T
    whole = prefill(model, [shared + tokens for tokens in continuations], feedback_passes)
    prefix = prefill_prefix(model, shared, feedback_passes, chunk=4)
    mode = resolve_mode("fused", feedback_passes) if feedback_passes else resolve_mode("soft")
    for chunk in (None, 3):
        ours, theirs = prefill_after(model, prefix, continuations, chunk), whole
        assert ours.positions_B.tolist() == theirs.positions_B.tolist()
        assert [len(layer) for layer in ours.cache.layers] == [len(layer) for layer in theirs.cache.layers]
        assert_equal(ours.top_BD, theirs.top_BD)
        for tokens in new:
            ours, theirs = step(model, ours, tokens, mode), step(model, theirs, tokens, mode)
            assert_equal(ours.top_BD, theirs.top_BD)


@pytest.mark.parametrize(("mode", "passes"), [("standard", None), ("soft", None), ("fused", 1)], ids=str)
def test_generation_after_a_prefix(model: FullBandModel, mode: str, passes: int | None) -> None:
    (shared,), continuations = random_prompts([9]), random_prompts([3, 8, 1], seed=1)
    prompts = [shared + tokens for tokens in continuations]
    prefix = prefill_prefix(model, shared, passes or 0)
    settings: dict[str, Any] = {"max_new_tokens": 8, "n": 2, "temperature": 2.0, "repetition_penalty": 1.2}
    made = collect(stream_from(model, prefill_after(model, prefix, continuations), mode, passes, prompts=prompts, **settings))
    assert made == generate(model, prompts, mode, passes, **settings)


@every_reading
def test_a_prefix_stays_valid(model: FullBandModel, feedback_passes: int | str) -> None:
    (shared,) = random_prompts([7])
    prefix = prefill_prefix(model, shared, feedback_passes)
    once = prefill_after(model, prefix, [[1, 2, 3]]).top_BD
    prefill_after(model, prefix, [[4, 5, 6, 7], [8]])
    assert torch.equal(prefill_after(model, prefix, [[1, 2, 3]]).top_BD, once)


def test_what_a_prefix_cannot_be(model: FullBandModel) -> None:
    prefix = prefill_prefix(model, [1] * 40)
    with pytest.raises(ValueError, match=f"prompt 1 has 9 tokens after a prefix of 40; .* context of {CONTEXT}"):
        prefill_after(model, prefix, [[2], [3] * 9])
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        prefill_after(model, prefix, [[2], []])
    with pytest.raises(ValueError, match="'converged' settles a part of a prompt otherwise"):
        prefill_prefix(model, [1, 2], "converged")
    with pytest.raises(ValueError, match="at least one position"):
        prefill_prefix(model, [1, 2], chunk=0)
