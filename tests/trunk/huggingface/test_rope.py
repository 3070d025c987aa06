"""Rotary positions whose angles depend on the length of the text: right up to where they change, refused by name beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from fullband.decode import generate, prefill, resolve_mode, step
from fullband.hf import attach
from fullband.trunk.huggingface.rope import fixed_angles
from reference.decoding import reference_tops
from reference.seam import embed, read, run_trunk
from trunk.huggingface.families import CONTEXT, Converted, assert_near, build, random_tokens, run_source

CHANGE = 16  # tokens up to which the angles are fixed
LONG: dict[str, Any] = dict(
    rope_type="longrope", rope_theta=10_000.0, short_factor=[1.0, 1.2], long_factor=[3.0, 7.0], original_max_position_embeddings=CHANGE
)
DYNAMIC: dict[str, Any] = dict(rope_type="dynamic", factor=4.0, rope_theta=10_000.0)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("longrope", dict(rope_parameters=LONG, original_max_position_embeddings=CHANGE)),
    "phimoe": ("longrope", dict(rope_parameters=LONG | dict(short_mscale=1.0, long_mscale=1.3), experts_implementation="eager")),
    "llama": ("dynamic", dict(rope_parameters=DYNAMIC, max_position_embeddings=CHANGE + 1)),
}
every_kind = pytest.mark.parametrize("family", CASES)


def made(family: str, dtype: torch.dtype = torch.float64) -> Converted:
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the family")
    return Converted(build(family, dtype=dtype, **CASES[family][1]))


@every_kind
@torch.no_grad()
def test_up_to_the_change_everything_equals_recomputation(family: str) -> None:
    """Ragged prompts, one of them as long as goes, in chunks; then decoding up to the last position."""
    model, mode = made(family), resolve_mode("fused")
    prompts, new = [random_tokens(1, n, seed=n)[0].tolist() for n in (CHANGE - 3, 4)], random_tokens(2, 3, seed=5)
    for chunk in (None, 3):
        state = prefill(model, prompts, 1, chunk)
        tops = [state.top_BD]
        for tokens in new.T:
            state = step(model, state, tokens, mode)
            tops.append(state.top_BD)
        for i, prompt in enumerate(prompts):
            expected = reference_tops(model, prompt, new[i].tolist(), 1, True, run_source)
            assert_near(torch.stack(tops, dim=1)[i], torch.stack(expected))
    whole = read(model, random_tokens(1, CHANGE), 2)
    model.trunk.lm(random_tokens(1, CHANGE + 9))  # the source itself goes beyond, and forgets it
    assert torch.equal(read(model, random_tokens(1, CHANGE), 2), whole)


@every_kind
@torch.no_grad()
def test_beyond_it_is_refused_by_name(family: str) -> None:
    """Read whole, in pieces, decoded, from positions further on, and as the longest of ragged rows."""
    model, kind = made(family), CASES[family][0]
    trunk, tokens = model.trunk, random_tokens(2, CHANGE + 1)
    message = f"context of {CHANGE} \\('{family}' turns positions by other angles in longer texts: its rope_type is '{kind}'\\)"
    inputs = embed(trunk, tokens)
    _, cache = run_trunk(trunk, inputs[:, :CHANGE], keep="all")
    for beyond in (
        lambda: read(model, tokens, 1),
        lambda: read(model, tokens),
        lambda: prefill(model, [tokens[0].tolist(), [3, 4]]),
        lambda: run_trunk(trunk, inputs),
        lambda: run_trunk(trunk, inputs[:, CHANGE:], cache=cache),
        lambda: run_trunk(trunk, inputs[:, :4], torch.arange(CHANGE - 3, CHANGE + 1)[None]),
    ):
        with pytest.raises(ValueError, match=message):
            beyond()
    prompts = [[3, 4, 5], tokens[0, :9].tolist()]
    with pytest.raises(ValueError, match=f"exceeds the model's context of {CHANGE} \\(room for 7\\) \\('{family}' turns positions"):
        generate(model, prompts, "soft", max_new_tokens=CHANGE - 8, stop_ids=())
    together = generate(model, prompts, "soft", max_new_tokens=CHANGE - 9, stop_ids=())
    assert [made.tokens for made in together] == [
        generate(model, [p], "soft", max_new_tokens=CHANGE - 9, stop_ids=())[0].tokens for p in prompts
    ]
    trunk.context, trunk.context_note = CONTEXT, ""  # what would happen
    inputs = embed(trunk, random_tokens(2, CHANGE + 6))
    whole = run_trunk(trunk, inputs)[0]
    _, cache = run_trunk(trunk, inputs[:, :CHANGE], keep="all")
    assert (run_trunk(trunk, inputs[:, CHANGE:], cache=cache)[0] - whole[:, CHANGE:]).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_transformers_calls_are_refused_or_stop_there(family: str) -> None:
    with pytest.warns(UserWarning, match=f"with latent feedback the context is {CHANGE} tokens"):
        model = attach(build(family, dtype=torch.float32, **CASES[family][1]), feedback_passes=1)
    tokens = random_tokens(2, CHANGE + 1)
    for training in (False, True):
        with pytest.raises(ValueError, match="turns positions by other angles"):
            model.train(training)(tokens, labels=tokens)
    model.eval()
    with pytest.warns(UserWarning, match="turns positions by other angles"):
        assert model.generate(tokens[:, :9], max_new_tokens=40, eos_token_id=None).shape[1] == CHANGE
    model.config.feedback_passes = 0  # the source, as far as it goes
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, model.trunk.lm(tokens).logits)


def test_what_changes_is_decided_by_the_config() -> None:
    def found(family: str = "llama", **overrides: Any) -> tuple[int, str] | None:
        return fixed_angles(build(family, dtype=torch.float32, **overrides).config)

    scaled = dict(factor=4.0, rope_theta=10_000.0, original_max_position_embeddings=12)
    assert found() is found("gemma3_text") is found("gpt2") is None
    assert found(rope_parameters=dict(rope_type="yarn", **scaled)) is None
    assert found(rope_parameters=dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, **scaled)) is None
    assert found(rope_parameters=LONG | dict(long_factor=[1.0, 1.2])) is None  # both are the same
    by_type = {"sliding_attention": dict(rope_type="default", rope_theta=10_000.0), "full_attention": DYNAMIC}
    assert found("gemma3_text", rope_parameters=by_type) == (CONTEXT - 1, "dynamic")
