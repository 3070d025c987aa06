"""A converted model in vLLM: vLLM's own class for the source's architecture, and the connection that feeds its top states back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix

from fullband.feedback.connection import Connection
from fullband.hf.config import FullBandConfig
from fullband.trunk.huggingface.trunk import scaled_norm

TRUNK, CONNECTION, SCALE = "trunk.lm.", "connection.", "trunk.embedding_scale"


@dataclass
class Plan:
    """What of the rows of one step is fed back.

    rows, before_ND   generated tokens, and the states before them
    prompts           (first row, past the last row, feedback passes) of prompts that are fused; they begin at position 0
    """

    rows: list[int] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    prompts: list[tuple[int, int, int]] = field(default_factory=list)


class FullBandForCausalLM(nn.Module):
    """vLLM's interface. The runner sets `plan` before each step; without one it is the source's model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config: FullBandConfig = vllm_config.model_config.hf_config
        trunk = self.config.trunk_config
        names = trunk.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[trunk.model_type]]
        self.lm = init_vllm_registered_model(vllm_config, hf_config=trunk, architectures=names, prefix=maybe_prefix(prefix, "lm"))
        text = self.config.get_text_config()
        self.connection = Connection(self.config.connected, text.hidden_size, text.num_hidden_layers)
        self.embedding_scale = nn.Parameter(torch.ones((), dtype=torch.float32), requires_grad=False)
        self.plan: Plan | None = None

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.lm.embed_input_ids(input_ids)

    def input_norm(self, inputs: Tensor) -> Tensor:
        """Merged inputs at the scale of plain ones, as `HuggingFaceTrunk.input_norm`."""
        return scaled_norm(inputs, self.embedding_scale)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: object = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        # Always embeddings, never ids: a compiled trunk takes the one kind that it has seen first.
        plan = self.plan or Plan()
        plain_ND = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        inputs_ND = plain_ND.clone() if plan.rows else plain_ND
        if plan.rows:
            inputs_ND[plan.rows] = self._merge(plain_ND[plan.rows], torch.stack(plan.before).to(plain_ND))
        states_ND = self.lm(None, positions, intermediate_tensors, inputs_ND)
        for done in range(max((passes for *_, passes in plan.prompts), default=0)):
            # Each pass writes all keys and values anew before it attends to them; what is not fed back gets the same ones.
            inputs_ND = inputs_ND.clone()
            for first, stop, passes in plan.prompts:
                if done < passes and stop - first > 1:
                    inputs_ND[first + 1 : stop] = self._merge(plain_ND[first + 1 : stop], states_ND[first : stop - 1])
            states_ND = self.lm(None, positions, intermediate_tensors, inputs_ND)
        return states_ND

    def _merge(self, plain_ND: Tensor, carried_ND: Tensor) -> Tensor:
        merged: Tensor = self.connection.merge(plain_ND[None], carried_ND[None], self)[0]  # type: ignore[arg-type]  # it asks for input_norm
        return merged.to(plain_ND.dtype)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.lm.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Raises ValueError for a weight of the connection that is missing."""
        own = dict(self.connection.named_parameters())
        loaded: set[str] = set()

        def of_trunk() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.startswith(TRUNK):
                    yield name.removeprefix(TRUNK), tensor
                elif name == SCALE:
                    self.embedding_scale.data.copy_(tensor)
                    loaded.add("embedding_scale")
                elif name.startswith(CONNECTION):
                    short = name.removeprefix(CONNECTION)
                    own[short].data.copy_(tensor)
                    loaded.add(name)

        loaded |= {f"lm.{name}" for name in self.lm.load_weights(of_trunk())}
        missing = [name for name in own if f"{CONNECTION}{name}" not in loaded]
        if missing:
            raise ValueError(f"the checkpoint has no weight '{CONNECTION}{missing[0]}'")
        return loaded
