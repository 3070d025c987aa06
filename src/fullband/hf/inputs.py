"""Arguments of `forward` that latent feedback has no use for: passed over where they say nothing, refused by name where they do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fullband.trunk.decoder import Decoder
from fullband.trunk.huggingface import HuggingFaceTrunk
from fullband.trunk.protocol import Trunk

WITHOUT_MEANING = ("fused_lm_head", "cache_position", "is_causal")  # for whoever calls; what transformers counts by itself
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # say again what position_ids say
AUXILIARY = (
    "the routers' auxiliary loss is not computed with latent feedback; set model.config.trunk_config.output_router_logits=False "
    "(TRL: router_aux_loss_coef=0.0)"
)
WHOLE = "a text is computed whole; to go on from it, give forward(cache=) an empty fullband.hf.FeedbackCache"
REASONS = {
    "output_router_logits": AUXILIARY,
    "token_type_ids": "feedback fuses token embeddings alone, so types other than 0 would be lost",
    "use_cache": WHOLE,
    "cache": WHOLE,
    "labels": "a FeedbackCache goes on from prompts and gives no loss; leave the cache out",
}


def refuse_ignored(trunk: Trunk, arguments: Mapping[str, Any], packed: bool = False) -> None:
    """Raises ValueError naming the first of the arguments that forward with latent feedback would ignore although it says something.

    packed   whether position_ids are given, which say where the documents of a row start
    """
    for name, value in arguments.items():
        if value is None or value is False or name in WITHOUT_MEANING or (name in PACKING and packed):
            continue
        if name == "token_type_ids" and isinstance(value, Tensor) and not bool(value.any()) and not _types_tokens(trunk):
            continue  # many tokenizers give them, all 0
        raise ValueError(f"{name}: {_reason(name, trunk)}")


def _reason(name: str, trunk: Trunk) -> str:
    if name in ("output_hidden_states", "output_attentions"):
        if isinstance(trunk, Decoder):
            return "fullband.diagnose records those of an App. A decoder"
        return "not given out with latent feedback; feedback_passes=0 gives the source's"
    if name in PACKING:
        return "give position_ids too, with a 0 at the start of each document of a row"
    return REASONS.get(name, "forward with latent feedback has no such argument, and would ignore it")


def refuse_auxiliary_loss(trunk: Trunk) -> None:
    """Raises ValueError if the trunk's config asks for a loss beside that of the labels, which would be left out."""
    if isinstance(trunk, HuggingFaceTrunk) and getattr(trunk.lm.config.get_text_config(decoder=True), "output_router_logits", False):
        raise ValueError(f"output_router_logits: {AUXILIARY}")


def _types_tokens(trunk: Trunk) -> bool:
    return isinstance(trunk, HuggingFaceTrunk) and "token_type_ids" in inspect.signature(trunk.lm.base_model.forward).parameters
