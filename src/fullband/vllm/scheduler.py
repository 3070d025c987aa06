"""vLLM's schedulers with what prefix caching has to know: whose blocks hold what a plain prefill of the same tokens computes."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from fullband.vllm.settings import fused_setting, requested_mode

logger = init_logger(__name__)


class _ByMode:
    """Standard and Soft prefill prompts alike and share their blocks. Blocks of a fused prompt are found by requests with as many passes
    only, and not at all where prompts are prefilled whole. Blocks with generated tokens are found if they were computed plainly, in
    Standard: the next turn of a conversation prefills the answer before it plainly."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        coordinator = self.kv_cache_manager.coordinator  # type: ignore[attr-defined]  # of the Scheduler it is mixed into
        cache_blocks = coordinator.cache_blocks

        def cache_blocks_of_mode(request: Request, num_computed_tokens: int) -> None:
            if self._mode(request).feeds_back:
                num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
            cache_blocks(request, num_computed_tokens)

        coordinator.cache_blocks = cache_blocks_of_mode

    def add_request(self, request: Request) -> None:
        if request.resumable:  # vLLM asks nobody about these before, and an exception here would end the engine
            logger.error(
                "fullband: a resumable input moves the end of its prompt, where feedback begins: request %s fails", request.request_id
            )
            self.grammar_compile_error_reqs.add(request.request_id)  # type: ignore[attr-defined]  # vLLM's way to fail one request
        mode = self._mode(request)
        if mode.feedback_passes:
            request.cache_salt = f"{request.cache_salt or ''}|fused {mode.feedback_passes}"
            request.block_hashes.clear()
            request.update_block_hashes()
            if fused_setting(self.vllm_config) != "two_kv":  # type: ignore[attr-defined]
                request.skip_reading_prefix_cache = True
        super().add_request(request)  # type: ignore[misc]

    def _mode(self, request: Request) -> Any:
        params = request.sampling_params
        return requested_mode(params.extra_args if params is not None else None, self.vllm_config.model_config.hf_config)  # type: ignore[attr-defined]


class FullBandScheduler(_ByMode, Scheduler):
    pass


class FullBandAsyncScheduler(_ByMode, AsyncScheduler):
    pass


def scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Named in `scheduler_cls`: which of the two is known only after all settings are."""
    kind = FullBandAsyncScheduler if vllm_config.scheduler_config.async_scheduling else FullBandScheduler
    return kind(*args, vllm_config=vllm_config, **kwargs)
