"""Any Hugging Face causal LM as a trunk, through `inputs_embeds`."""

from fullband.trunk.huggingface.check import Adaptation, check_model
from fullband.trunk.huggingface.trunk import HuggingFaceTrunk

__all__ = ["Adaptation", "HuggingFaceTrunk", "check_model"]
