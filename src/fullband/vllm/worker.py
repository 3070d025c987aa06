"""vLLM's CPU worker and V1 runner, which remember what is fed back: the states of every generated token, and of the prompt's last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from fullband.vllm.model import FullBandForCausalLM, Plan
from fullband.vllm.setup import mode_of


class FullBandRunner(CPUModelRunner):
    """`_histories[request]`: states at the positions P - 1, P, … of a prompt of P tokens. All of them: a request that was preempted is
    computed again, prompt and answer in one step, and each token of the answer needs the state that it had before it."""

    model: FullBandForCausalLM

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._histories: dict[str, list[Tensor]] = {}

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        self._histories.pop(req_id, None)
        super()._on_request_state_removed(req_id, req_state)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        rows = self._rows_of_step()
        self.model.plan = self._plan(rows)
        try:
            states_ND = super()._model_forward(*args, **kwargs)
        finally:
            self.model.plan = None
        self._remember(rows, states_ND)
        return states_ND

    def _rows_of_step(self) -> list[tuple[str, int, int, int, int]]:
        """(request, first row, past the last row, position of the first row, tokens of the prompt) of every request in this step."""
        batch, starts = self.input_batch, self.query_start_loc.np
        return [
            (batch.req_ids[i], int(starts[i]), int(starts[i + 1]), int(batch.num_computed_tokens_cpu[i]), int(batch.num_prompt_tokens[i]))
            for i in range(batch.num_reqs)
        ]

    def _plan(self, rows: list[tuple[str, int, int, int, int]]) -> Plan:
        plan = Plan()
        for request, first, stop, position, prompt in rows:
            mode = mode_of(self.requests[request].sampling_params, self.model.config)
            if not mode.feeds_back:
                continue
            history = self._histories.get(request, [])
            for row in range(first + max(0, prompt - position), stop):
                plan.rows.append(row)
                plan.before.append(history[position + row - first - prompt])
            if mode.feedback_passes and position < prompt:
                assert position == 0, "prompts are prefilled whole"
                assert isinstance(mode.feedback_passes, int)
                plan.prompts.append((first, first + min(stop - first, prompt), mode.feedback_passes))
        return plan

    def _remember(self, rows: list[tuple[str, int, int, int, int]], states_ND: Tensor) -> None:
        for request, first, stop, position, prompt in rows:
            history = self._histories.setdefault(request, [])
            for row in range(first + max(0, prompt - 1 - position), stop):
                place = position + row - first - (prompt - 1)
                state = states_ND[row].detach().clone()
                if place < len(history):
                    history[place] = state  # computed again
                else:
                    assert place == len(history)
                    history.append(state)


class FullBandCPUWorker(CPUWorker):
    """vLLM's, with our runner."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = FullBandRunner(self.vllm_config, torch.device("cpu"))
