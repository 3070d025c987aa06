"""A full-bandwidth model among transformers models: importing this registers it with the Auto classes."""

from transformers import AutoConfig, AutoModelForCausalLM

from fullband.hf.cache import FeedbackCache
from fullband.hf.config import FullBandConfig
from fullband.hf.convert import attach, detach
from fullband.hf.model import FullBandForCausalLM

AutoConfig.register("fullband", FullBandConfig, exist_ok=True)
AutoModelForCausalLM.register(FullBandConfig, FullBandForCausalLM, exist_ok=True)

__all__ = ["FeedbackCache", "FullBandConfig", "FullBandForCausalLM", "attach", "detach"]
