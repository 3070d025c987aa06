"""vLLM's CPU worker, and its V1 runner, which says what the rows of a step are. (The V2 runner asks the model: `model_state`.)"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from fullband.decode.modes import Mode
from fullband.vllm.carried import Chunk
from fullband.vllm.model import FullBandForCausalLM
from fullband.vllm.settings import requested_mode


class FullBandRunner(CPUModelRunner):
    model: FullBandForCausalLM

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._modes: dict[str, Mode] = {}

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        self._modes.pop(req_id, None)
        super()._on_request_state_removed(req_id, req_state)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        batch, starts, table = self.input_batch, self.query_start_loc.np, self.input_batch.block_table[0]
        self.model.carried.block_size = table.block_size
        self.model.chunks = [
            Chunk(
                request,
                self._mode(request),
                int(starts[i]),
                int(starts[i + 1]),
                int(batch.num_computed_tokens_cpu[i]),
                int(batch.num_prompt_tokens[i]),
                table.block_table.np[i],
            )
            for i, request in enumerate(batch.req_ids[: batch.num_reqs])
        ]
        return super()._model_forward(*args, **kwargs)

    def _mode(self, request: str) -> Mode:
        if request not in self._modes:
            params = self.requests[request].sampling_params
            self._modes[request] = requested_mode(params.extra_args if params is not None else None, self.model.config)
        return self._modes[request]


class _Forgets:
    """What ended is forgotten; what was preempted is not, as its states are needed when it is computed again."""

    def execute_model(self, scheduler_output: Any) -> Any:
        self.model_runner.model.carried.forget(scheduler_output.finished_req_ids)  # type: ignore[attr-defined]
        return super().execute_model(scheduler_output)  # type: ignore[misc]


class FullBandCPUWorker(_Forgets, CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        if not self.use_v2_model_runner:
            self.model_runner = FullBandRunner(self.vllm_config, torch.device("cpu"))


class FullBandWorker(_Forgets, Worker):
    """On a GPU, with the V2 runner."""
