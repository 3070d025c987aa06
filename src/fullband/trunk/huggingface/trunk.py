"""A Hugging Face causal LM as a trunk. One adapter for all families; `check.py` says whether a model fits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from fullband.layout import NOWHERE, Layout
from fullband.trunk.cache import Slots, extend_documents
from fullband.trunk.huggingface.cache import HuggingFaceCache
from fullband.trunk.huggingface.masks import document_masks, is_packed
from fullband.trunk.huggingface.rope import fixed_angles
from fullband.trunk.huggingface.skip import passing_over
from fullband.trunk.protocol import Keep, LowerOutput, Merge, TrunkOutput, check_depths
from fullband.trunk.residual import watched


@dataclass(frozen=True)
class Adaptation:
    """What a family does besides its embedding module, its stack and its head. A division is a field of its own, not a multiplication by
    the reciprocal: unless the number is a power of two they round differently.

    embedding_multiplier  factor between the embedding module's output and what the stack gets (falcon_h1)
    state_divisor         what top states are divided by before the head (minicpm3)
    logit_multiplier      factor on the head's output (cohere, falcon_h1)
    logit_divisor         what the head's output is divided by (granite)
    """

    embedding_multiplier: float = 1.0
    state_divisor: float = 1.0
    logit_multiplier: float = 1.0
    logit_divisor: float = 1.0

    @property
    def head_factor(self) -> float:
        """Logits per head(top state)."""
        return self.logit_multiplier / self.logit_divisor / self.state_divisor


class HuggingFaceTrunk(nn.Module):
    """`lm` is any decoder-only causal LM of transformers. See `protocol.Trunk` for the contract.

    adaptation       as `check_model` finds it
    embedding_scale  root mean square of plain inputs: fused ones are brought to it (`input_norm`); a buffer
    """

    embedding_scale: Tensor

    def __init__(self, lm: PreTrainedModel, adaptation: Adaptation = Adaptation()):
        super().__init__()
        self.lm, self.adaptation = lm, adaptation
        config = lm.config.get_text_config(decoder=True)
        self.width = int(self._embedding.embedding_dim)  # of the stack's inputs and outputs; layers may be wider inside (opt)
        self.vocab_size = int(self._embedding.num_embeddings)
        self.context, self.context_note = int(getattr(config, "max_position_embeddings", None) or 2**31 - 1), ""
        fixed = fixed_angles(config)
        if fixed is not None and fixed[0] < self.context:
            self.context, rope = fixed
            self.context_note = f" ('{config.model_type}' turns positions by other angles in longer texts: its rope_type is '{rope}')"
        self.layer_types = list(get_layer_types_and_kwargs(config)[0])
        empty = HuggingFaceCache.empty(config)
        self.can_crop_cache = not empty.recurrent
        self._empty = empty
        self.entry, self._in_tuples = 0, cast(bool | None, None)
        self.sources: tuple[int, ...] = ()
        accepted = inspect.signature(self._stack.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.2x
        self.register_buffer("embedding_scale", torch.ones(()), persistent=True)

    @property
    def _stack(self) -> Any:
        return self.lm.base_model

    @property
    def _embedding(self) -> Any:
        return self.lm.get_input_embeddings()

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of the stack, in order."""
        lists = (module for module in self._stack.modules() if isinstance(module, nn.ModuleList))
        return next(module for module in lists if len(module) == len(self.layer_types))

    @property
    def supports_prefix_reuse(self) -> bool:
        """Whether pass 1 can be run in pieces under autograd: transformers' gradient checkpointing drops the cache."""
        name = "is_activation_checkpointing" if hasattr(self.lm, "is_activation_checkpointing") else "is_gradient_checkpointing"
        return not (self.lm.training and getattr(self.lm, name, False))

    @property
    def draws_dropout(self) -> bool:
        """Whether a pass draws random numbers: transformers' families keep the rates of dropout in module attributes, or in nn.Dropout."""
        return self.lm.training and any(_dropout_rate(module) > 0 for module in self.lm.modules())

    @property
    def head_weight(self) -> Tensor:
        weight, factor = self.lm.get_output_embeddings().weight, self.adaptation.head_factor
        return weight if factor == 1 else weight * factor

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    def head(self, top: Tensor) -> Tensor:
        """[..., V] from top states [..., D], computed as the source computes them."""
        by = self.adaptation
        logits = self.lm.get_output_embeddings()(top if by.state_divisor == 1 else top / by.state_divisor)
        logits = logits if by.logit_multiplier == 1 else logits * by.logit_multiplier
        return logits if by.logit_divisor == 1 else logits / by.logit_divisor

    def embeddings(self, tokens_BT: Tensor) -> Tensor:
        return self._embedding(tokens_BT)

    def connect(self, entry: int, sources: tuple[int, ...]) -> None:
        """Raises ValueError too for an entry inside a stack with recurrent layers, whose states and masks the parts would share."""
        if entry and self._empty.recurrent:
            raise ValueError("a stack with recurrent layers can't be entered inside: use entry 0")
        self.entry, self.sources = check_depths(entry, sources, len(self.layers))

    @torch.no_grad()
    def calibrate(self, tokens: Tensor | None = None) -> float:
        """Measure `embedding_scale`: over `tokens` (any shape), or over the whole vocabulary. Returns it."""
        weight = self._embedding.weight
        tokens = torch.arange(self.vocab_size, device=weight.device) if tokens is None else tokens.flatten()
        squares = [self._scaled(self._embedding(part)).double().square().mean(-1) for part in tokens.split(8192)]
        self.embedding_scale.fill_(torch.cat(squares).mean().sqrt())
        return float(self.embedding_scale)

    def input_norm(self, inputs_BTD: Tensor) -> Tensor:
        """Fused inputs at the scale and in the dtype of the source's plain ones, which stay untouched."""
        return scaled_norm(inputs_BTD.to(self._embedding.weight.dtype), self.embedding_scale)

    @property
    def _layers_in_tuples(self) -> bool:
        """Whether layers return the residual stream in a tuple: seen once, on one token."""
        if self._in_tuples is None:
            seen: list[Any] = []
            handle = self.layers[0].register_forward_hook(lambda module, given, output: seen.append(output))
            try:
                with torch.no_grad():
                    self._stack(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
            finally:
                handle.remove()
            self._in_tuples = isinstance(seen[0], tuple)
        return self._in_tuples

    def _scaled(self, embeddings: Tensor) -> Tensor:
        factor = self.adaptation.embedding_multiplier
        return embeddings if factor == 1 else embeddings * factor

    def below(self, given: Tensor, layout: Layout = NOWHERE, cache: HuggingFaceCache | None = None, keep: Keep = "none") -> LowerOutput:
        x = self._scaled(given if given.is_floating_point() else self._embedding(given))
        if not self.entry:
            return LowerOutput(x, (), None)
        in_tuples = self._layers_in_tuples
        carried: list[Tensor] = []
        reached: list[Tensor] = []
        with ExitStack() as stack:
            for depth in (depth for depth in self.sources if depth < self.entry):
                stack.enter_context(watched(self, depth, carried.append))
            stack.enter_context(watched(self, self.entry, reached.append))
            stack.enter_context(passing_over(self.layers[self.entry :], in_tuples))
            _, cache = self._run(x, layout, cache or self._empty.part(0, self.entry), keep)
        return LowerOutput(reached[0], tuple(carried), cache)

    def above(
        self,
        x_BTD: Tensor,
        layout: Layout = NOWHERE,
        cache: HuggingFaceCache | None = None,
        keep: Keep = "none",
        merges: Mapping[int, Merge] | None = None,
    ) -> TrunkOutput:
        """See the protocol. Raises ValueError for packed documents where they cannot be kept apart, for a cache under gradient
        checkpointing, for one token after a cache with recurrent layers where gradients are kept, for positions at which a text's
        earlier ones would turn by other angles (`fixed_angles`), and for several entries under gradient checkpointing."""
        if merges and not self.supports_prefix_reuse:
            raise ValueError("gradient checkpointing runs a layer again without what enters there: use one entry depth, or none of it")
        in_tuples = bool(self.entry) and self._layers_in_tuples
        carried: list[Tensor] = []
        with ExitStack() as stack:
            for depth, merge in (merges or {}).items():
                stack.enter_context(watched(self, depth, merge))
            for depth in (depth for depth in self.sources if depth >= self.entry):
                stack.enter_context(watched(self, depth, carried.append))
            if self.entry:
                stack.enter_context(passing_over(self.layers[: self.entry], in_tuples, x_BTD))
            top_BTD, cache = self._run(x_BTD, layout, cache or self._empty.part(self.entry, len(self.layers)), keep)
        return TrunkOutput(top_BTD, tuple(carried), cache)

    def _run(self, inputs_BTD: Tensor, layout: Layout, past: HuggingFaceCache, keep: Keep) -> tuple[Tensor, HuggingFaceCache | None]:
        """The stack over these inputs, through the layers that are not passed over."""
        batch, added, _ = inputs_BTD.shape
        positions_BT = layout.positions_BT
        uses_cache = keep != "none" or past.length > 0
        if uses_cache and not self.supports_prefix_reuse:
            raise ValueError("gradient checkpointing drops the cache of a Hugging Face trunk: only whole rows can be run under it")
        if past.length and past.recurrent and added == 1 and torch.is_grad_enabled():
            raise ValueError("recurrent layers run a single token without gradients: use torch.no_grad(), or pieces of at least two tokens")
        documents = extend_documents(past if past.length else None, layout.documents_BT, batch, added, inputs_BTD.device)
        arguments: dict[str, Any] = {"attention_mask": self._mask(past, documents, added, inputs_BTD.dtype), "use_cache": uses_cache}
        if positions_BT is None and past.length:  # not every family counts them itself
            positions_BT = torch.arange(past.length, past.length + added, device=inputs_BTD.device)[None]
        if self.context_note:
            length = added if positions_BT is None else int(positions_BT.max()) + 1
            if length > self.context:
                raise ValueError(f"{length} tokens do not fit the context of {self.context}{self.context_note}")
        if positions_BT is not None:
            arguments["position_ids"] = positions_BT.clamp(min=0)
            if documents is None and not uses_cache:  # without any mask transformers takes a position that restarts for a new document
                arguments["attention_mask"] = inputs_BTD.new_ones(batch, added, dtype=torch.long)
        lent = past.lend() if uses_cache else None
        output = self._stack(inputs_embeds=inputs_BTD, **{self._cache_name: lent}, **arguments)
        if keep == "none":
            return output.last_hidden_state, None
        assert lent is not None
        return output.last_hidden_state, past.take_back(lent, added, documents, trim=keep == "window")

    def _mask(self, past: HuggingFaceCache, documents: Slots | None, added: int, dtype: torch.dtype) -> Any:
        if documents is None:
            return None
        attention = self._stack.config._attn_implementation
        if attention in ("eager", "sdpa") and not past.recurrent:
            return document_masks(past, documents.tensor, added, self.layer_types, attention, dtype)
        if is_packed(documents.tensor):
            raise ValueError(
                "a trunk with recurrent layers cannot run several documents in one sequence: its state would cross between them"
                if past.recurrent
                else f"several documents in one row need attn_implementation 'sdpa' or 'eager': '{attention}' takes no masks for them"
            )
        return (documents.tensor >= 0).long()


def _dropout_rate(module: nn.Module) -> float:
    rates = (
        [module.p] if isinstance(module, nn.Dropout) else [v for k, v in vars(module).items() if "dropout" in k and isinstance(v, float)]
    )
    return max(rates, default=0.0)


def scaled_norm(inputs: Tensor, scale: Tensor) -> Tensor:
    """Inputs [..., D] at the root mean square `scale`, in their dtype; in at least float32 on the way."""
    precise = torch.promote_types(inputs.dtype, torch.float32)
    return (nn.functional.rms_norm(inputs.to(precise), inputs.shape[-1:], eps=1e-6) * scale.to(precise)).to(inputs.dtype)
