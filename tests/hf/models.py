"""Tiny full-bandwidth models in float64 with near-isometric weights, of three Hugging Face families and of App. A; and their slow twins."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fullband.hf import FullBandConfig, FullBandForCausalLM, attach
from reference.decoding import reference_tops, run_decoder
from trunk.huggingface.families import CONTEXT, VOCABULARY, WINDOW, build

FAMILIES = ["llama", "gemma3_text", "falcon_h1", "native"]  # full attention, sliding windows, recurrent layers, App. A
NATIVE = dict(vocab_size=VOCABULARY, width=16, layers=3, heads=4, kv_heads=2, glu_width=24, context=CONTEXT, window=WINDOW, full_every=3)
PROMPTS = [[5, 9, 14, 3], [7, 21, 4, 4, 11, 26, 8]]
PADDED = torch.tensor([[0] * (7 - len(prompt)) + prompt for prompt in PROMPTS])
MASK = torch.tensor([[0] * (7 - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])


def make(family: str, fusion: str = "gated", shape: dict[str, Any] | None = None, **config: Any) -> FullBandForCausalLM:
    """A model of its own, in evaluation mode. `shape` overrides the trunk's."""
    torch.manual_seed(1)
    if family == "native":
        model = FullBandForCausalLM(FullBandConfig(trunk=NATIVE | (shape or {}), fusion=fusion, **config)).double()
        nn.init.normal_(model.trunk.embedding.weight)
        fresh: nn.Module = model
    else:
        model = attach(build(family, **(shape or {})), fusion=fusion, **config)
        fresh = model.connection
    for module in fresh.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
    return model.eval()


@cache
def shared(family: str) -> FullBandForCausalLM:
    """One for all tests, which leave it as it is."""
    return make(family)


def run_row(model: FullBandForCausalLM, inputs_1TD: Tensor) -> Tensor:
    """Top states [1, T, D] of a whole row: no cache, no mask."""
    if model.config.trunk_config is None:
        return run_decoder(model, inputs_1TD)
    return model.trunk.lm.base_model(inputs_embeds=inputs_1TD, use_cache=False).last_hidden_state


@torch.no_grad()
def slow_logits(model: FullBandForCausalLM, prompt: list[int], new: list[int], passes: int | str, feeds_back: bool = True) -> Tensor:
    """[new + 1, V]: logits behind the prompt and behind each new token, all computed anew for every one (Eqs. 8-11)."""
    return torch.stack([model.trunk.head(top) for top in reference_tops(model, prompt, new, passes, feeds_back, run_row)])


def assert_near(found: Tensor, expected: Tensor) -> None:
    """transformers computes norms, and hands logits to its loops, in float32."""
    assert not found.isnan().any()
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=2e-6 * max(1.0, float(expected.detach().abs().max())))
