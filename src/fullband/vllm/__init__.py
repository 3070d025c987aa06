"""A plugin of vLLM: full-bandwidth models, native or converted, decoded in any mode (App. D). Nothing of vLLM is patched.

vLLM finds it by its entry point and asks `register` in every process. What was tried: vLLM 0.32 on a CPU.
"""

from __future__ import annotations

ARCHITECTURE = "FullBandForCausalLM"


def register() -> None:
    """Tell vLLM of our config, model and checks. May be called several times."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import fullband.hf  # noqa: F401  its config among transformers'
    from fullband.vllm.setup import FullBandSetup

    ModelRegistry.register_model(ARCHITECTURE, "fullband.vllm.model:FullBandForCausalLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = FullBandSetup
