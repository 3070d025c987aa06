"""Any Hugging Face causal LM as a trunk, through `inputs_embeds`."""

from fullband.trunk.huggingface.check import check_cut, check_model
from fullband.trunk.huggingface.trunk import Adaptation, HuggingFaceTrunk

__all__ = ["Adaptation", "HuggingFaceTrunk", "check_cut", "check_model"]
