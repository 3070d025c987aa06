"""What `check_model` finds and what it refuses: by numbers, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel, PreTrainedModel, T5Config, T5ForConditionalGeneration

from fullband.trunk.huggingface import Adaptation, check_model
from reference.seam import read
from trunk.huggingface.families import WINDOW, Converted, build, random_tokens


def refusal(lm: PreTrainedModel) -> str:
    """The sentence in which a model is refused: it names the model type, and is one line."""
    with pytest.raises(ValueError) as caught:
        check_model(lm)
    text = str(caught.value)
    assert text.startswith(f"'{lm.config.model_type}' cannot be a trunk: ") and "\n" not in text
    return text.split("trunk: ")[1]


def llama(**overrides: Any) -> PreTrainedModel:
    return build("llama", dtype=torch.float32, **overrides)


def with_stack(change: Callable[..., Any]) -> PreTrainedModel:
    """A llama whose stack reads through `change(forward, arguments)`."""
    lm = llama()
    forward = lm.model.forward

    @wraps(forward)  # its signature is what the adapter looks at
    def changed(**arguments: Any) -> Any:
        return change(forward, arguments)

    lm.model.forward = changed
    return lm


@pytest.mark.parametrize(
    ("family", "overrides", "found"),
    [
        ("llama", {}, Adaptation()),
        ("gemma3_text", {}, Adaptation()),  # its embedding module scales
        ("granite", dict(embedding_multiplier=12.0, logits_scaling=8.0), Adaptation(logit_divisor=8.0)),  # its stack scales
        ("cohere", dict(logit_scale=0.0625), Adaptation(logit_multiplier=0.0625)),
        ("falcon_h1", {}, Adaptation(1.7, logit_multiplier=0.3)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_factors_are_the_configs_own(family: str, overrides: dict[str, Any], found: Adaptation, dtype: torch.dtype) -> None:
    assert check_model(build(family, dtype=dtype, **overrides)) == found


def test_the_model_stays_as_it_is() -> None:
    lm = llama()
    lm.train()
    lm.model.layers[0].eval()
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    check_model(lm)
    assert lm.training and lm.model.layers[1].training and not lm.model.layers[0].training
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())


def test_models_without_the_parts() -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=29, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))
    assert refusal(t5) == "it is an encoder-decoder, latent feedback needs a decoder-only causal LM"
    assert "load it with AutoModelForCausalLM" in refusal(LlamaModel(llama().config))
    assert "has a bias" in refusal(build("phi", dtype=torch.float32))
    assert "caps its logits" in refusal(build("gemma2", dtype=torch.float32))
    assert refusal(build("bloom", dtype=torch.float32)) == "its base model takes no position_ids"
    lm = llama()
    lm.model.forward = lambda input_ids, attention_mask=None, position_ids=None: None
    assert refusal(lm) == "its base model takes no inputs_embeds"
    lm = llama()
    assert "not loaded" in refusal(lm.to("meta"))


def test_adapters_are_refused() -> None:
    lm = llama()
    lm._hf_peft_config_loaded = True
    assert "merge them first (merge_and_unload)" in refusal(lm)
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    assert "merge them first (merge_and_unload)" in refusal(wrapped)
    check_model(wrapped.merge_and_unload())


def test_layers_whose_past_is_of_another_kind() -> None:
    lm = build("llama4_text", dtype=torch.float32, attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=24)
    assert refusal(lm) == "it attends within chunks of the text, which this cache has no masks for"


def test_side_inputs_besides_the_embedding() -> None:
    shape: dict[str, Any] = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=29, sliding_window=WINDOW)
    gemma4 = dict(layer_types=["sliding_attention", "full_attention"], global_head_dim=4, num_kv_shared_layers=0)
    assert "it cannot run inputs that are no token's embedding" in refusal(build("gemma4_text", dtype=torch.float32, **shape, **gemma4))

    def token_aware(forward: Any, arguments: dict[str, Any]) -> Any:
        if arguments.get("input_ids") is not None:
            arguments["inputs_embeds"] = lm.model.embed_tokens(arguments["input_ids"]) + arguments.pop("input_ids")[..., None] / 29
        return forward(**arguments)

    lm = with_stack(token_aware)
    assert "each token has side inputs besides its embedding" in refusal(lm)


def test_a_table_that_is_looked_up_backwards() -> None:
    """A token that is recovered from its embedding is not found for fused inputs, which are none's."""

    def looked_up(forward: Any, arguments: dict[str, Any]) -> Any:
        inputs = arguments.get("inputs_embeds")
        if inputs is not None:
            away = (inputs[..., None, :] - lm.model.embed_tokens.weight).norm(dim=-1).amin(-1, keepdim=True)
            arguments["inputs_embeds"] = inputs * (away < 1e-3)
        return forward(**arguments)

    lm = with_stack(looked_up)
    assert refusal(lm) == "a small change of its inputs changes its states altogether"


def test_logits_that_are_not_the_heads() -> None:
    lm = llama()
    forward = lm.forward

    def capped(**arguments: Any) -> Any:
        output = forward(**arguments)
        output.logits = output.logits.tanh()
        return output

    lm.forward = capped
    assert refusal(lm) == "its logits are not head(last hidden state)"


def test_caches_and_masks_that_do_not_work() -> None:
    def forgetful(forward: Any, arguments: dict[str, Any]) -> Any:
        return forward(**{name: value for name, value in arguments.items() if name not in ("cache", "past_key_values", "attention_mask")})

    assert refusal(with_stack(forgetful)) == "a text in pieces gives other states than the whole"
    unmasked = with_stack(lambda forward, arguments: forward(**{n: v for n, v in arguments.items() if n != "attention_mask"}))
    assert refusal(unmasked) == "a text gives other states after padding"

    def failing(forward: Any, arguments: dict[str, Any]) -> Any:
        inputs = arguments.get("inputs_embeds")
        if inputs is not None and inputs.shape[1] < 5:
            raise TypeError("no cache of this kind. Really.")
        return forward(**arguments)

    assert refusal(with_stack(failing)) == "it cannot run a text in pieces (no cache of this kind)"


def test_a_source_that_its_trunk_would_only_come_near() -> None:
    """Law 1 is to the bit: a factor of no number in the config is found, but rounds elsewhere than the source does."""
    lm = llama()
    forward = lm.forward

    def halved_in_double(**arguments: Any) -> Any:
        output = forward(**arguments)
        output.logits = (output.logits.double() * 0.3).float()
        return output

    lm.forward = halved_in_double
    assert "without feedback it would not be itself, bit for bit: logits differ by up to" in refusal(lm)


def test_a_stack_that_is_wider_inside() -> None:
    """opt-350m embeds at half its width and projects back: states and embeddings are equally wide, whatever hidden_size says."""
    narrow = dict(ffn_dim=24, word_embed_proj_dim=8, do_layer_norm_before=False)
    model = Converted(build("opt", dtype=torch.float32, **narrow))
    tokens = random_tokens(2, 6)
    assert model.trunk.width == 8 and read(model, tokens, 2).shape == (2, 6, 8)
    lm = llama()
    lm.model.norm = torch.nn.Linear(16, 8)
    lm.lm_head = torch.nn.Linear(8, 29, bias=False)
    assert refusal(lm) == "its embeddings are 16 wide and its states 8: the fusion takes both at one width"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_that_forgets_its_state_is_refused_in_every_precision(dtype: torch.dtype) -> None:
    """jamba's layers begin anew in every piece of more than one token. With small weights, and in low precision with any, the stack's
    output hardly shows it: the states do."""
    small = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=29)
    mamba = dict(num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False)
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(AutoConfig.for_model("jamba", **small, **mamba)).to(dtype).eval()
    for lm in (fresh, build("jamba", dtype=dtype, **mamba)):
        assert refusal(lm) == "a text in pieces gives other states than the whole"
