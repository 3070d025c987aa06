"""PEFT wraps the model as any other: on the trunk, on the fusion, merged or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf.models import MASK, PADDED, PROMPTS, assert_near, make, slow_logits

peft = pytest.importorskip("peft")
SETTINGS: dict[str, Any] = dict(attention_mask=MASK, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
SETTINGS |= dict(return_dict_in_generate=True, output_logits=True)


@pytest.mark.parametrize("family, targets", [("llama", ["q_proj", "down_proj", "state"]), ("native", ["query", "both"])])
@pytest.mark.parametrize("mode", ["standard", "soft", "fused"])
def test_generation_with_an_adapter_is_generation_with_it_merged(family: str, targets: list[str], mode: str) -> None:
    fusion = "concat" if "both" in targets else "gated"
    base = make(family, fusion).generate(PADDED, latent_feedback_mode=mode, **SETTINGS)
    wrapped = peft.get_peft_model(make(family, fusion), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=2)).double()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    adapted = wrapped.eval().generate(PADDED, latent_feedback_mode=mode, **SETTINGS)
    assert not torch.allclose(torch.stack(adapted.logits), torch.stack(base.logits), atol=1e-2)
    merged = wrapped.merge_and_unload()
    plain = merged.generate(PADDED, latent_feedback_mode=mode, **SETTINGS)
    assert torch.equal(adapted.sequences, plain.sequences)
    assert_near(torch.stack(adapted.logits), torch.stack(plain.logits))
    for row, prompt in enumerate(PROMPTS):
        new = plain.sequences[row, PADDED.shape[1] : -1].tolist()
        expected = slow_logits(merged, prompt, new, 1 if mode == "fused" else 0, feeds_back=mode != "standard")
        assert_near(torch.stack(plain.logits, dim=1)[row], expected)
