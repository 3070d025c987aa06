"""The App. A trunk in vLLM: the decoder's own modules, with vLLM's attention over vLLM's keys and values in each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from fullband.trunk.decoder import Decoder
from fullband.trunk.rope import rotary


@support_torch_compile(dynamic_arg_dims={"x_ND": 0, "positions_N": 0})
class Stack(nn.Module):
    """Rows of a step through all blocks: N tokens of any requests, each at its position.

    decoder   the trunk, whose weights have the names of a checkpoint
    attends   vLLM's attention of each layer, in order
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config.native_trunk
        self.decoder = Decoder(config)
        size, longest = config.head_size, vllm_config.model_config.max_model_len
        self.attends = nn.ModuleList(
            Attention(
                config.heads,
                size,
                size**-0.5,
                num_kv_heads=config.kv_heads,
                cache_config=vllm_config.cache_config,
                per_layer_sliding_window=window if window is not None and window < longest else None,
                prefix=f"{prefix}.blocks.{depth}.attention",
            )
            for depth, window in enumerate(self.decoder.windows)
        )

    def forward(self, x_ND: Tensor, positions_N: Tensor) -> Tensor:
        """Top states [N, D] of what enters the stack."""
        decoder = self.decoder
        cos, sin = rotary(positions_N[None], decoder.config, x_ND.dtype)
        for block, attend in zip(decoder.blocks, self.attends, strict=True):
            x_ND = _through(block, attend, x_ND, cos, sin)
        return decoder.final_norm(x_ND)


def _through(block: Any, attend: nn.Module, x_ND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `decoder.Block.forward` and `decoder.Attention.attend`, over vLLM's cache in place of ours."""
    query, new = block.attention.project(block.attention_norm_in(x_ND)[None], cos, sin)
    rows = len(x_ND)

    def flat(heads_1HNd: Tensor) -> Tensor:
        return heads_1HNd[0].transpose(0, 1).reshape(rows, -1)

    keys, values = new.unbind()
    attended = attend(flat(query.vectors), flat(keys), flat(values)).view(rows, -1, block.attention.head_size)
    opened = (attended * query.opened[0].transpose(0, 1)).reshape(rows, -1)
    x_ND = x_ND + block.attention_norm_out(block.attention.output(opened))
    return x_ND + block.glu_norm_out(block.glu(block.glu_norm_in(x_ND)))


class NativeTrunk(nn.Module):
    """A `Decoder` with the interface of vLLM's language models. Its inputs are what enters the stack: embeddings after the input norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.stack = Stack(vllm_config=vllm_config, prefix=prefix)

    @property
    def decoder(self) -> Decoder:
        return self.stack.decoder

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.decoder.below(input_ids).x_BTD

    def input_norm(self, merged: Tensor) -> Tensor:
        return self.decoder.input_norm(merged)

    def forward(self, input_ids: None, positions: Tensor, intermediate_tensors: object, inputs_embeds: Tensor) -> Tensor:
        """Top states [N, D]: what is fed back, and what the head takes."""
        return self.stack(inputs_embeds, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.decoder.head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Names of the weights that were loaded. Raises ValueError for one that is missing, not the trunk's, or of another shape."""
        own, loaded = dict(self.decoder.named_parameters()), set()
        for name, tensor in weights:
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(f"the checkpoint's weight 'trunk.{name}' {list(tensor.shape)} does not belong to a trunk of this shape")
            own[name].data.copy_(tensor)
            loaded.add(name)
        if missing := sorted(own.keys() - loaded):
            raise ValueError(f"the checkpoint has no weight 'trunk.{missing[0]}'")
        return {f"stack.decoder.{name}" for name in loaded}
