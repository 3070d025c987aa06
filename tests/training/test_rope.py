"""Context extension of Hugging Face sources and of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullband.config import ModelConfig, Recipe
from fullband.hf.context import extend_source
from fullband.training import train
from fullband.training.run import prepare

MakeRecipe = Callable[..., Recipe]
YARN = {"factor": 4, "original": 64}


def test_a_source_gets_yarn(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=16, hidden_size=64, num_attention_heads=4, max_position_embeddings=64)
    base = config.rope_parameters["rope_theta"]
    extend_source(config, ModelConfig.model_validate({"source": "x", "rope": YARN}))
    assert config.max_position_embeddings == 256
    expected = LlamaConfig(
        head_dim=16, hidden_size=64, num_attention_heads=4, max_position_embeddings=256,
        rope_parameters={"rope_type": "yarn", "rope_theta": base, "factor": 4.0, "original_max_position_embeddings": 64},
    )  # fmt: skip
    ours, theirs = LlamaRotaryEmbedding(config), LlamaRotaryEmbedding(expected)
    assert torch.equal(ours.inv_freq, theirs.inv_freq) and ours.attention_scaling == theirs.attention_scaling > 1


def test_a_base_and_a_context_alone() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(max_position_embeddings=64)
    extend_source(config, ModelConfig(source="x", rope_base=5e5, context=256))
    assert (config.rope_parameters["rope_theta"], config.rope_parameters["rope_type"]) == (5e5, "default")
    assert config.max_position_embeddings == 256


def test_only_layers_that_see_the_whole_text_are_extended() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma3_text")
    before = dict(config.rope_parameters["sliding_attention"])
    extend_source(config, ModelConfig.model_validate({"source": "x", "rope": YARN}))
    assert config.rope_parameters["sliding_attention"] == before and config.rope_parameters["full_attention"]["rope_type"] == "yarn"


def test_a_source_without_rotary_positions_is_refused() -> None:
    from transformers import GPT2Config

    with pytest.raises(ValueError, match="'gpt2' has no rotary positions to extend"):
        extend_source(GPT2Config(), ModelConfig(source="x", context=4096))


@pytest.mark.parametrize("extension", [{"rope": YARN}, {"rope_base": 5e5, "context": 256}])
@pytest.mark.parametrize("by_source", [True, False])
def test_a_checkpoint_is_trained_on_longer_rows(recipe: MakeRecipe, extension: dict[str, Any], by_source: bool) -> None:
    """The long-context stage: the short run's weights, rows beyond its context, three passes."""
    short = recipe("short", train__steps=1)
    train(short)
    model: dict[str, Any] = {"source": short.output} if by_source else {"trunk": short.model.trunk}
    start = {} if by_source else {"train__initial_checkpoint": short.output}
    longer = recipe("long", model=model | extension, data__length=100, feedback__schedule="three-pass", train__steps=2, **start)
    before = prepare(short.model_copy(update={"output": f"{short.output}-look"}), resume=False).model
    run = prepare(longer, resume=False)
    assert run.model.trunk.context == 256 and run.model.config.trunk.width == before.config.trunk.width
    assert run.model.config.trunk.rope == (None if "rope_base" in extension else ModelConfig.model_validate({"rope": YARN}).rope)
    result = train(longer)
    assert result.steps == 2 and result.milestones.switch_on_step == 0
    assert train(longer.model_copy(update={"train": longer.train.model_copy(update={"steps": 3})}), resume=True).steps == 3
