"""Families that scale embeddings, logits or residuals, by numbers that are no power of two: law 1 holds to the bit all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from fullband.trunk.huggingface import Adaptation
from reference.seam import embed, run_trunk
from trunk.huggingface.families import WINDOW, Converted, build, random_tokens

GRANITE: dict[str, Any] = dict(embedding_multiplier=11.0, logits_scaling=6.0, residual_multiplier=0.22, attention_multiplier=0.3)
EXPERTS: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2)
LATENT: dict[str, Any] = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, num_key_value_heads=4)
BY_SIX, TIMES = Adaptation(logit_divisor=6.0), Adaptation(logit_multiplier=0.07)
CASES: dict[str, tuple[dict[str, Any], Adaptation]] = {
    "granite": (GRANITE, BY_SIX),
    "granite_swa": (GRANITE | dict(sliding_window=WINDOW), BY_SIX),
    "granitemoe": (GRANITE | EXPERTS, BY_SIX),
    "granitemoe_swa": (GRANITE | EXPERTS | dict(sliding_window=WINDOW), BY_SIX),
    "granitemoeshared": (GRANITE | EXPERTS | dict(shared_intermediate_size=12), BY_SIX),
    "cohere": (dict(logit_scale=0.07), TIMES),
    "cohere2": (dict(logit_scale=0.07, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]), TIMES),
    "hyperclovax": (GRANITE | dict(logits_scaling=0.07), TIMES),
    "falcon_h1": ({}, Adaptation(1.7, logit_multiplier=0.3)),
    "minicpm3": (LATENT | dict(scale_emb=11, dim_model_base=6, scale_depth=1.4), Adaptation(state_divisor=16 / 6)),  # before the head
    "gemma": (dict(hidden_size=20), Adaptation()),  # its embedding module scales, by the root of the width
    "gemma3_text": (dict(hidden_size=20), Adaptation()),
    "xglm": (dict(d_model=20, num_layers=2, attention_heads=4, ffn_dim=24), Adaptation()),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", CASES)
def test_scaled_families_are_their_sources_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the family")
    overrides, adaptation = CASES[family]
    trunk = Converted(build(family, dtype=dtype, **overrides)).trunk
    assert trunk.adaptation == adaptation
    tokens = random_tokens(2, 24)
    states = run_trunk(trunk, embed(trunk, tokens))[0]
    assert torch.equal(trunk.head(states), trunk.lm(input_ids=tokens, use_cache=False).logits)
    torch.testing.assert_close(
        states @ trunk.head_weight.T, trunk.head(states), rtol=0.02, atol=0.02 * float(trunk.head(states).abs().max())
    )
