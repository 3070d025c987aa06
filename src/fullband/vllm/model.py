"""A full-bandwidth model in vLLM: a trunk of vLLM's own classes or ours, and the connection that feeds its top states back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix

from fullband.feedback.connection import Connection, current_name
from fullband.files import verify_manifest
from fullband.hf.config import FullBandConfig
from fullband.trunk.huggingface.trunk import scaled_norm
from fullband.vllm.carried import Carried, Chunk
from fullband.vllm.native import NativeTrunk
from fullband.vllm.settings import fused_setting

TRUNK, CONNECTION, SCALE = "trunk.", "connection.", "trunk.embedding_scale"


class FullBandForCausalLM(nn.Module):
    """vLLM's interface. The runner says what the rows of a step are (`chunks`) before it calls `forward`; where it does not (vLLM's dummy
    runs), nothing is fed back."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config: FullBandConfig = vllm_config.model_config.hf_config
        trunk = self.config.trunk_config

        def of_vllm(name: str) -> Any:
            if trunk is None:
                return NativeTrunk(vllm_config, maybe_prefix(prefix, name))
            names = trunk.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[trunk.model_type]]
            return init_vllm_registered_model(vllm_config, hf_config=trunk, architectures=names, prefix=maybe_prefix(prefix, name))

        self.lm: Any = of_vllm("lm")
        # In the first pass over a prompt that is fused, where that pass has keys and values of its own.
        self.first_pass: Any = with_modules_of(of_vllm("first_pass"), self.lm) if fused_setting(vllm_config) == "two_kv" else None
        text = self.config.get_text_config()
        self.connection = Connection(self.config.connected, text.hidden_size, text.num_hidden_layers)
        if trunk is not None:
            self.embedding_scale = nn.Parameter(torch.ones((), dtype=torch.float32), requires_grad=False)
        self.folder = Path(vllm_config.model_config.model)
        self.carried = Carried()
        self.chunks: Sequence[Chunk] | None = None

    def get_model_state_cls(self) -> type:
        """Asked by the V2 runner."""
        from fullband.vllm.model_state import FullBandState

        return FullBandState

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.lm.embed_input_ids(input_ids)

    def input_norm(self, inputs: Tensor) -> Tensor:
        """Merged inputs at the scale of plain ones, as the trunks' own."""
        return self.lm.input_norm(inputs) if self.config.trunk_config is None else scaled_norm(inputs, self.embedding_scale)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: object = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        # Always embeddings, never ids: a compiled trunk takes the one kind that it has seen first.
        plain_ND = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        chunks, self.chunks = self.chunks, None
        if chunks is None:
            if self.first_pass is not None:
                self.first_pass(None, positions, intermediate_tensors, plain_ND)
            return self.lm(None, positions, intermediate_tensors, plain_ND)
        rows, before = self.carried.before_generated(chunks)
        inputs_ND = plain_ND
        if rows:
            inputs_ND = plain_ND.clone()
            inputs_ND[rows] = self._merge(plain_ND[rows], torch.stack(before).to(plain_ND))
        prompts = [chunk for chunk in chunks if chunk.passes]
        for done in range(max((chunk.passes for chunk in prompts), default=0)):
            # With one set of keys and values each pass writes all of them anew before it attends to them, which is right for prompts that
            # begin in this step; rows that are not fed back in it write the same ones again. With two sets the last pass has its own.
            stack = self.lm if self.first_pass is None else self.first_pass
            states_ND = stack(None, positions, intermediate_tensors, inputs_ND)
            inputs_ND = inputs_ND.clone()
            for chunk in prompts:
                if done < chunk.passes:
                    before_D = self.carried.before_prompt(chunk)
                    first = chunk.first + (before_D is None)  # nothing comes before the first token
                    carried_ND = states_ND[chunk.first : chunk.generated - 1]
                    if before_D is not None:
                        carried_ND = torch.cat([before_D[None], carried_ND])
                    inputs_ND[first : chunk.generated] = self._merge(plain_ND[first : chunk.generated], carried_ND)
                    if self.first_pass is not None:
                        self.carried.keep_tails(chunk, states_ND)
        states_ND = self.lm(None, positions, intermediate_tensors, inputs_ND)
        self.carried.keep_generated(chunks, states_ND)
        return states_ND

    def _merge(self, plain_ND: Tensor, carried_ND: Tensor) -> Tensor:
        merged: Tensor = self.connection.merge(plain_ND[None], carried_ND[None], self)[0]  # type: ignore[arg-type]  # it asks for input_norm
        return merged.to(plain_ND.dtype)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.lm.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Raises ValueError for a damaged file, and for a weight of the connection that is missing."""
        verify_manifest(self.folder)
        own = dict(self.connection.named_parameters())
        loaded: set[str] = set()

        def of_trunk() -> Iterable[tuple[str, Tensor]]:
            for saved_as, tensor in weights:
                name = current_name(saved_as)
                if name == SCALE:
                    self.embedding_scale.data.copy_(tensor)
                    loaded.add("embedding_scale")
                elif name.startswith(TRUNK):
                    yield name.removeprefix(TRUNK).removeprefix("lm."), tensor
                elif name.startswith(CONNECTION):
                    short = name.removeprefix(CONNECTION)
                    own[short].data.copy_(tensor)
                    loaded.add(name)

        loaded |= {f"lm.{name}" for name in self.lm.load_weights(of_trunk())}
        missing = [name for name in own if f"{CONNECTION}{name}" not in loaded]
        if missing:
            raise ValueError(f"the checkpoint has no weight '{CONNECTION}{missing[0]}'")
        return loaded


def with_modules_of(model: nn.Module, other: nn.Module) -> nn.Module:
    """`model` with the modules of `other`, all but those that attend: the same weights, other keys and values."""
    for name, child in model.named_children():
        if any(isinstance(module, Attention) for module in child.modules()):
            if not isinstance(child, Attention):
                with_modules_of(child, getattr(other, name))
        else:
            setattr(model, name, getattr(other, name))
    for name, _ in model.named_parameters(recurse=False):
        setattr(model, name, getattr(other, name))
    return model
