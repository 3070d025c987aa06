"""What is asked of vLLM and its settings at start, and of every request before it is taken."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import vllm
from vllm import SamplingParams, envs
from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2LogitsProcessor

from fullband.decode.modes import resolve_mode
from fullband.hf.config import FullBandConfig
from fullband.model import is_exported
from fullband.vllm.settings import fused_setting

logger = init_logger(__name__)
VERSIONS = ("0.32",)
CPU_HEADS = CPUAttentionBackend.get_supported_head_sizes()
HOOKS = {  # what of vLLM is subclassed or called, none of it public: looked for at start
    "vllm.v1.core.sched.scheduler:Scheduler": ("add_request", "finish_requests"),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": ("cache_blocks",),
    "vllm.v1.request:Request": ("get_skip_reading_prefix_cache", "update_block_hashes"),
    "vllm.v1.worker.gpu_worker:Worker": ("execute_model", "init_device"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("_model_forward", "_on_request_state_removed"),
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState": (
        "add_request",
        "remove_request",
        "preprocess_state",
        "initialize_kv_cache",
    ),
    "vllm.v1.sample.logits_processor:LogitsProcessor": ("validate_params",),
}


class FullBandSetup(VerifyAndUpdateConfig):
    """Refuses what can't work, in a sentence, and names our worker, our scheduler and our check of requests."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        config: FullBandConfig = vllm_config.model_config.hf_config
        fused = fused_setting(vllm_config)
        for wrong, why in _refusals(vllm_config, config, fused):
            if wrong:
                raise ValueError(f"fullband in vLLM: {why}")
        scheduler, on_cpu = vllm_config.scheduler_config, current_platform.device_type == "cpu"
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = f"fullband.vllm.worker.FullBand{'CPU' if on_cpu else ''}Worker"
        scheduler.scheduler_cls = "fullband.vllm.scheduler.scheduler"
        if fused == "whole":
            scheduler.enable_chunked_prefill = False
            scheduler.max_num_batched_tokens = max(scheduler.max_num_batched_tokens, vllm_config.model_config.max_model_len)
        if not on_cpu:
            logger.warning("fullband: tried on CPUs only; on this device without CUDA graphs")
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        known = list(vllm_config.model_config.logits_processors or [])
        vllm_config.model_config.logits_processors = [*known, f"fullband.vllm.setup:{CHECKS[fused].__name__}"]


def _refusals(vllm_config: VllmConfig, config: FullBandConfig, fused: str) -> list[tuple[Any, str]]:
    parallel, connection, scheduler = vllm_config.parallel_config, config.connected, vllm_config.scheduler_config
    factors, missing, head = config.adaptation, _missing_hook(), vllm_config.model_config.get_head_size()
    return [
        (not vllm.__version__.startswith(VERSIONS), f"tried with vLLM {', '.join(VERSIONS)}.x, this is {vllm.__version__}"),
        (missing, f"this vLLM has no {missing}, which the plugin builds on"),
        (
            current_platform.device_type != "cpu" and not vllm_config.use_v2_model_runner,
            "on a GPU it needs the V2 model runner: unset VLLM_USE_V2_MODEL_RUNNER",
        ),
        (
            current_platform.device_type == "cpu" and head not in CPU_HEADS,
            f"its attention on a CPU takes heads of {', '.join(map(str, CPU_HEADS))}, not {head}; `fullband serve` takes this model",
        ),
        (
            config.trunk_config is None and not _makes_text(vllm_config.model_config),
            f"{vllm_config.model_config.model} has no tokenizer or generation config that vLLM can use: `fullband convert` writes "
            "both; ids as prompts do without, with skip_tokenizer_init",
        ),
        (
            connection.source != "top" or connection.entry != 0 or connection.window != 1,
            "carries the top state to the input of the stack only; `fullband serve` takes other connections",
        ),
        (any(value != 1 for value in vars(factors).values()), "this family scales its embeddings, states or logits outside the stack"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism would have to carry the last stage's state to the first"),
        (parallel.tensor_parallel_size > 1, "tensor parallelism was not tried"),
        (parallel.data_parallel_size > 1, "data parallelism was not tried: start a server for each part"),
        (parallel.use_ubatching, "a batch split in two has other rows than the states that are fed back"),
        (
            parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
            "context parallelism spreads a prompt's positions, whose states are fed back, over devices",
        ),
        (vllm_config.speculative_config is not None, "speculative decoding needs each drafted token's state before it is checked"),
        (vllm_config.lora_config is not None, "LoRA was not tried"),
        (vllm_config.quant_config is not None, "quantization was not tried"),
        (vllm_config.model_config.enable_prompt_embeds, "prompt embeddings have no tokens to fuse with"),
        (vllm_config.kv_transfer_config is not None, "a cache from elsewhere has no states"),
        (scheduler.scheduler_cls is not None, "another scheduler would not know which blocks hold what"),
        (
            fused != "whole" and config.latent_feedback_mode == "fused" and (fused == "off" or config.feedback_passes not in (None, 0, 1)),
            f'the model\'s own mode, fused with {config.feedback_passes or 1} feedback passes, does not go with {{"fused": "{fused}"}}',
        ),
    ]


def _makes_text(model: ModelConfig) -> bool:
    """Whether vLLM finds what texts and their ends need, or is asked for none. In the layout of `fullband train` the tokenizer is ours."""
    folder = Path(model.model)
    return model.skip_tokenizer_init or model.tokenizer != model.model or not folder.is_dir() or is_exported(folder)


def _missing_hook() -> str | None:
    for place, names in HOOKS.items():
        module, _, kind = place.partition(":")
        try:
            found = getattr(import_module(module), kind)
        except (ImportError, AttributeError):
            return place
        for name in names:
            if not hasattr(found, name):
                return f"{place}.{name}"
    return None


class RequestCheck(LogitsProcessor, V2LogitsProcessor):
    """Changes no logits: vLLM asks it about every request before it is taken. Of both runners' kinds."""

    fused: ClassVar[str] = "whole"

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for a mode that does not exist or does not run here."""
        extra = sampling_params.extra_args or {}
        name, passes = extra.get("mode"), extra.get("feedback_passes")
        if name is not None and not isinstance(name, str):
            raise ValueError(f"mode: must be a string, got {name!r}")
        if isinstance(passes, str):
            raise ValueError("feedback_passes: vLLM runs 1, 2, … passes over a prompt; `fullband serve` takes 'exact' and 'converged'")
        mode = resolve_mode(name or ("fused" if passes else "soft"), passes)
        if mode.feedback_passes and cls.fused == "off":
            raise ValueError('mode: this server was started with {"fused": "off"}: standard and soft only')
        if mode.feedback_passes not in (0, 1) and cls.fused == "two_kv":
            raise ValueError(f'feedback_passes: this server was started with {{"fused": "two_kv"}}: 1 only, got {mode.feedback_passes}')
        if (
            sampling_params.seed is not None
            and cls.fused != "whole"
            and current_platform.device_type == "cpu"
            and not envs.VLLM_USE_V2_MODEL_RUNNER
        ):
            raise ValueError("seed: vLLM's V1 runner on a CPU ends at it where prompts are prefilled in chunks")  # as without this plugin
        if sampling_params.watermarking is False and sampling_params.max_tokens == 1 and not sampling_params.detokenize:
            raise ValueError("beam search hands in each answer anew as a prompt, whose tokens are not fed back")  # the mark of its requests

    def __init__(self, *args: Any):
        pass

    def add_request(self, *args: Any) -> bool:
        return False

    def apply(self, logits: Any, *args: Any) -> Any:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass


class TwoKVCheck(RequestCheck):
    fused = "two_kv"


class OffCheck(RequestCheck):
    fused = "off"


CHECKS = {check.fused: check for check in (RequestCheck, TwoKVCheck, OffCheck)}
