"""docs/architectures.md says of every family what the code does with it. If a row is wrong, the failure shows the right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from fullband.trunk.huggingface import HuggingFaceTrunk, check_model
from reference.seam import embed, run_trunk
from trunk.huggingface.families import FAMILIES, WINDOW, build, random_tokens

DOC = Path(__file__).parents[3] / "docs" / "architectures.md"
ALTERNATING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=12)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, num_key_value_heads=4)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=4)
GEMMA3N = dict(
    num_hidden_layers=4,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"] * 2,
    intermediate_size=[24] * 4,
    activation_sparsity_pattern=[0.0] * 4,
    vocab_size_per_layer_input=29,
    hidden_size_per_layer_input=8,
    laurel_rank=4,
    num_kv_shared_layers=2,
    altup_num_inputs=2,
)
GEMMA4 = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=29, global_head_dim=4, num_kv_shared_layers=0)
OTHERS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bamba": dict(attn_layer_indices=[1], **MAMBA),
    "bloom": {},
    "cohere": {},
    "cohere2": ALTERNATING,
    "deepseek_v3": LATENT | EXPERTS | dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1),
    "ernie4_5": {},
    "exaone4": ALTERNATING,
    "gemma": {},
    "gemma2": {},
    "gemma3n_text": GEMMA3N,
    "gemma4_text": ALTERNATING | GEMMA4,
    "glm4": {},
    "glm4_moe": EXPERTS | dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1),
    "gpt_bigcode": dict(n_embd=16, n_layer=2, n_head=4),
    "gpt_oss": ALTERNATING | dict(num_local_experts=4, num_experts_per_tok=2),
    "gptj": dict(n_embd=16, n_layer=2, n_head=4, rotary_dim=4),
    "granite": {},
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"], num_local_experts=2, shared_intermediate_size=16, **MAMBA),
    "jamba": dict(num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_experts=4, num_dense_layers=1, **EXPERTS),
    "llama4_text": dict(attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=24),
    "mamba": dict(state_size=4),
    "mamba2": dict(state_size=4, num_heads=8, head_dim=4, n_groups=1, chunk_size=4),
    "ministral": ALTERNATING,
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "mpt": dict(d_model=16, n_heads=4, n_layers=2),
    "nemotron": {},
    "olmo": {},
    "olmo3": ALTERNATING,
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "opt": dict(ffn_dim=24, word_embed_proj_dim=16),
    "phi": {},
    "qwen2_moe": dict(num_experts=4, shared_expert_intermediate_size=12, **EXPERTS),
    "qwen3_next": dict(
        num_experts=4,
        shared_expert_intermediate_size=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        **EXPERTS,
    ),
    "recurrent_gemma": dict(lru_width=16, attention_window_size=WINDOW, block_types=["recurrent", "attention"]),
    "stablelm": {},
    "starcoder2": {},
}
ENCODER_DECODER = "t5"


def tiny(family: str) -> PreTrainedModel:
    if family == ENCODER_DECODER:
        return T5ForConditionalGeneration(T5Config(vocab_size=29, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))
    return build(family, dtype=torch.float32, **OTHERS.get(family, {}))


def packing(trunk: HuggingFaceTrunk) -> str:
    """Whether two documents in a row read as they do alone."""
    tokens = random_tokens(1, 9)
    documents, positions = torch.tensor([[0] * 3 + [1] * 6]), torch.tensor([[*range(3), *range(6)]])
    with torch.no_grad():
        try:
            states = run_trunk(trunk, embed(trunk, tokens), positions, documents)[0]
        except ValueError:
            return "refused"
        for part in (slice(0, 3), slice(3, 9)):
            torch.testing.assert_close(states[:, part], run_trunk(trunk, embed(trunk, tokens[:, part]))[0], rtol=0, atol=1e-4)
    return "yes"


def row(family: str) -> str:
    """The line of the table."""
    lm = tiny(family)
    try:
        found = check_model(lm)
    except ValueError as error:
        return f"| `{family}` | no | | | {str(error).split('cannot be a trunk: ')[1]} |"
    trunk = HuggingFaceTrunk(lm, found)
    tested = "tested" if family in FAMILIES else "self-check"
    return f"| `{family}` | {tested} | {packing(trunk)} | {'yes' if trunk.can_crop_cache else 'refused'} | |"


@pytest.mark.parametrize("family", sorted([*FAMILIES, *OTHERS, ENCODER_DECODER]))
def test_the_table_says_what_the_code_does(family: str) -> None:
    lines = DOC.read_text(encoding="utf-8").splitlines()
    if family not in (*FAMILIES, ENCODER_DECODER) and transformers.__version__ < "5.24":
        pytest.skip("the table's self-checked families are those of transformers 5.24")
    assert row(family) in lines, f"docs/architectures.md should say:\n{row(family)}"


def test_the_table_has_no_other_rows() -> None:
    lines = DOC.read_text(encoding="utf-8").splitlines()
    found = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert found == sorted([*FAMILIES, *OTHERS, ENCODER_DECODER])
