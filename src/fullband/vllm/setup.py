"""What is asked of vLLM's settings at start, and of every request before it is taken."""

from __future__ import annotations

from typing import Any

import vllm
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessor

from fullband.decode.modes import Mode, resolve_mode
from fullband.hf.config import FullBandConfig

VERSIONS = ("0.32",)  # whose hooks were tried: the runner's forward, its clean-up, the config's and the parameters' checks


class FullBandSetup(VerifyAndUpdateConfig):
    """Refuses what can't work, in a sentence, and names our worker and our check of requests."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        config: FullBandConfig = vllm_config.model_config.hf_config
        for wrong, why in _refusals(vllm_config, config):
            if wrong:
                raise ValueError(f"fullband in vLLM: {why}")
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "fullband.vllm.worker.FullBandCPUWorker"
        # A prompt is prefilled whole: then Fused is exact, and no cached block is of another mode.
        vllm_config.cache_config.enable_prefix_caching = False
        scheduler = vllm_config.scheduler_config
        scheduler.enable_chunked_prefill = False
        scheduler.max_num_batched_tokens = max(scheduler.max_num_batched_tokens, vllm_config.model_config.max_model_len)
        known = list(vllm_config.model_config.logits_processors or [])
        vllm_config.model_config.logits_processors = [*known, "fullband.vllm.setup:RequestCheck"]


def _refusals(vllm_config: VllmConfig, config: FullBandConfig) -> list[tuple[Any, str]]:
    parallel, connection = vllm_config.parallel_config, config.connected
    factors = config.adaptation
    return [
        (not vllm.__version__.startswith(VERSIONS), f"tried with vLLM {', '.join(VERSIONS)}.x, this is {vllm.__version__}"),
        (current_platform.device_type != "cpu", "tried on CPUs only"),
        (vllm_config.use_v2_model_runner, "needs the V1 model runner: unset VLLM_USE_V2_MODEL_RUNNER"),
        (config.trunk_config is None, "an App. A model is served by `fullband serve`; vLLM takes converted models"),
        (
            connection.source != "top" or connection.entry != 0 or connection.window != 1,
            "carries the top state to the input of the stack only; `fullband serve` takes other connections",
        ),
        (any(value != 1 for value in vars(factors).values()), "this family scales its embeddings, states or logits outside the stack"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism would have to carry the last stage's state to the first"),
        (parallel.tensor_parallel_size > 1, "tensor parallelism was not tried"),
        (vllm_config.speculative_config is not None, "speculative decoding needs each drafted token's state before it is checked"),
        (vllm_config.lora_config is not None, "LoRA was not tried"),
        (vllm_config.model_config.enable_prompt_embeds, "prompt embeddings have no tokens to fuse with"),
        (vllm_config.kv_transfer_config is not None, "a cache from elsewhere has no states"),
    ]


def mode_of(params: SamplingParams | None, config: FullBandConfig) -> Mode:
    """The mode of a request: `extra_args` (over HTTP `vllm_xargs`), or the model's own. Raises ValueError."""
    extra = (params.extra_args if params is not None else None) or {}
    name = extra.get("mode", config.latent_feedback_mode)
    passes = extra.get("feedback_passes")
    if name == "fused" and passes is None and config.latent_feedback_mode == "fused" and isinstance(config.feedback_passes, int):
        passes = config.feedback_passes or None
    mode = resolve_mode(name, passes)
    if not isinstance(mode.feedback_passes, int):
        raise ValueError(f"feedback_passes: vLLM runs 1, 2, … passes over a prompt, not '{mode.feedback_passes}'; `fullband serve` does")
    return mode


class RequestCheck(LogitsProcessor):
    """Changes no logits: vLLM asks it about every request before it is taken."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for a mode that does not exist or does not run here."""
        extra = sampling_params.extra_args or {}
        resolve_mode(extra.get("mode", "fused" if extra.get("feedback_passes") else "soft"), extra.get("feedback_passes"))
        if isinstance(extra.get("feedback_passes"), str):
            raise ValueError("feedback_passes: vLLM runs 1, 2, … passes over a prompt; `fullband serve` takes 'exact' and 'converged'")

    def __init__(self, vllm_config: VllmConfig, device: Any, is_pin_memory: bool):
        pass

    def apply(self, logits: Any) -> Any:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass
