"""For vLLM's V2 runner, which asks a model for a state of its own: it says what the rows of a step are."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from fullband.decode.modes import Mode
from fullband.vllm.carried import Chunk
from fullband.vllm.settings import requested_mode


class FullBandState(DefaultModelState):
    """`preprocess_state` is called before every step but vLLM's own dummy runs."""

    supports_prompt_embeds = False
    model: Any  # model.FullBandForCausalLM, which imports this

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._known: dict[str, tuple[Mode, int]] = {}

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        mode = requested_mode(params.extra_args if params is not None else None, self.model.config)
        self._known[new_req_data.req_id] = mode, new_req_data.prompt_len

    def remove_request(self, req_id: str) -> None:
        """Of ended and of preempted requests; those come back by `add_request`."""
        super().remove_request(req_id)
        self._known.pop(req_id, None)

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self.model.carried.block_size = block_tables.block_sizes[0]

    def preprocess_state(self, input_batch: Any, block_tables: Any, kv_cache_config: Any, num_computed_tokens: Any) -> None:
        super().preprocess_state(input_batch, block_tables, kv_cache_config, num_computed_tokens)
        starts, chunks = input_batch.query_start_loc_np, []
        fused = any(self._known[request][0].feedback_passes for request in input_batch.req_ids)
        table = block_tables[0].cpu().numpy() if fused else None  # on a GPU this waits for it: only where a chunk of a prompt may need it
        for i, request in enumerate(input_batch.req_ids):
            mode, prompt = self._known[request]
            position = int(input_batch.num_computed_tokens_np[i])
            chunks.append(Chunk(request, mode, int(starts[i]), int(starts[i + 1]), position, prompt, () if table is None else table[i]))
        self.model.chunks = chunks
