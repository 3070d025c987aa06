"""Tiny random models of many families and a fusion beside them, with near-isometric weights (`isometric_model` in tests/conftest.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fullband.feedback.connection import Connection, connect
from fullband.feedback_config import ConnectionConfig
from fullband.trunk.huggingface import HuggingFaceTrunk, check_model

VOCABULARY, WINDOW, CONTEXT = 29, 5, 48
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=CONTEXT,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=WINDOW),
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, decoder_sparse_step=1, experts_implementation="eager"
    ),  # the grouped ones take no float64
    "gemma3_text": dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "olmo2": {},
    "phi3": {},
    "gpt_neox": {},
    "gpt2": dict(n_embd=16, n_layer=2, n_head=4, n_positions=CONTEXT, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "smollm3": {},
    "falcon_h1": dict(
        mamba_d_ssm=16,
        mamba_n_heads=4,
        mamba_d_head=4,
        mamba_d_state=4,
        mamba_n_groups=1,
        mamba_chunk_size=4,
        embedding_multiplier=1.7,
        lm_head_multiplier=0.3,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"], block_ff_dim=24),
}
FAMILIES = list(OWN)
HYBRIDS = ["falcon_h1", "lfm2"]  # layers with recurrent or convolution states
DENSE = [family for family in FAMILIES if family not in HYBRIDS]
SLIDING = ["mistral", "gemma3_text"]


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """A causal LM of the family in evaluation mode. Biases and norm weights are not the neutral ones, so that a forgotten one shows."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(SHAPE | OWN.get(family, {}) | overrides))
    lm = AutoModelForCausalLM.from_config(config)
    for name, parameter in lm.named_parameters():
        if name.endswith(("embed_tokens.weight", "embed_in.weight", "wte.weight")):
            nn.init.normal_(parameter)
        elif parameter.dim() == 2:
            nn.init.orthogonal_(parameter)
        elif parameter.dim() == 3 and "experts" in name:
            for matrix in parameter:
                nn.init.orthogonal_(matrix)
        elif name.endswith("bias"):
            nn.init.uniform_(parameter, -0.1, 0.1)
        elif "norm" in name and "mamba" not in name:
            parameter.data.add_(torch.empty_like(parameter).uniform_(-0.1, 0.1))
    return lm.to(dtype).eval()


class Converted(nn.Module):
    """A trunk and a connection: a `feedback.passes.FeedbackModel`."""

    def __init__(self, lm: PreTrainedModel, fusion: Any = "gated", **connection: Any):
        super().__init__()
        self.trunk = HuggingFaceTrunk(lm, check_model(lm))
        self.connection = Connection(ConnectionConfig(fusion=fusion, **connection), self.trunk.width, len(self.trunk.layers))
        connect(self.trunk, self.connection)
        for module in self.connection.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)
        self.trunk.calibrate()
        self.to(lm.dtype)
        self.train(lm.training)


@cache
def converted(family: str, fusion: str = "gated") -> Converted:
    """In float64. One for all tests, which leave it as it is."""
    return Converted(build(family), fusion)


def run_source(model: Converted, inputs_1TD: Tensor) -> Tensor:
    """Top states [1, T, D] of a whole row, from transformers alone: no mask, no cache."""
    return model.trunk.lm.base_model(inputs_embeds=inputs_1TD, use_cache=False).last_hidden_state


def random_tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Equal up to 1e-6: transformers computes norms in float32 even where everything else is in float64."""
    assert not found.isnan().any()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * max(1.0, float(expected.detach().abs().max())))
