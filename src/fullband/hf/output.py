"""What `forward` gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast


@dataclass
class FullBandOutput(CausalLMOutputWithPast):
    """transformers' output, and the top states that the logits are made of, [B, T, D]; None where the source itself computed them."""

    states: Tensor | None = None
