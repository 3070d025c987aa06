"""Context extension of Hugging Face models (section 4.2): a larger RoPE base, or YaRN, written into their config before they are loaded."""

from __future__ import annotations

from typing import Any

from fullband.config import ModelConfig


def extend_source(config: Any, model: ModelConfig) -> None:
    """Change the config of a causal LM in place, as the recipe's `model.rope_base`, `model.rope` and `model.context` say.

    Where layer types have rotary parameters of their own (gemma3), those that attend to the whole text are extended.
    Raises ValueError for a model without rotary positions.
    """
    if model.rope_base is None and model.rope is None and model.context is None:
        return
    text = config.get_text_config(decoder=True)
    known = getattr(text, "rope_parameters", None)
    if not known:
        raise ValueError(f"model.rope: '{text.model_type}' has no rotary positions to extend")
    per_type = all(isinstance(value, dict) for value in known.values())
    whole = known.get("full_attention") if per_type else known
    if whole is None:
        raise ValueError(f"model.rope: '{text.model_type}' has no layer that attends to the whole text")
    changed = dict(whole)
    if model.rope_base is not None:
        changed["rope_theta"] = model.rope_base
    if model.rope is not None:
        yarn = model.rope
        changed |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    text.rope_parameters = known | {"full_attention": changed} if per_type else changed
    context = model.context or (model.rope.context if model.rope else None)
    if context is not None:
        text.max_position_embeddings = context
