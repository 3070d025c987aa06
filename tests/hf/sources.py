"""A tiny Hugging Face checkpoint as people have them: weights, configs, tokenizer with a chat template, card, licence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from fullband.hf.source import align_weights

VOCABULARY = 264  # 256 bytes, three special tokens, five ids that no token has
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, bos_token_id=256, eos_token_id=257, pad_token_id=258, tie_word_embeddings=True,
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CARD = "---\nlicense: apache-2.0\nlanguage: en\n---\n\n# Tiny\n"


def tiny_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Near-isometric weights: ordinary random ones are chaotic under feedback."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | overrides)))
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            nn.init.orthogonal_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
    model.generation_config = GenerationConfig(bos_token_id=256, eos_token_id=[257, 256], pad_token_id=258, do_sample=False)
    return model.eval()


def plain_model(folder: Path, **options: Any) -> PreTrainedModel:
    """The checkpoint as transformers itself loads it, with weights laid out in memory as those of the models it is compared with:
    where they start decides how BLAS rounds."""
    lm = AutoModelForCausalLM.from_pretrained(folder, **options)
    align_weights(lm)
    return lm.eval()


def byte_tokenizer(ids: int = 259) -> PreTrainedTokenizerFast:
    """Bytes and special tokens, `ids` of them in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>", *(f"<|more_{number}|>" for number in range(ids - 259))]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=special[0], eos_token=special[1], pad_token=special[2])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_source(folder: Path, model: Any = None, tokenizer: Any = None) -> Path:
    """The checkpoint's folder."""
    (model or tiny_llama()).save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    (folder / "LICENSE").write_text("Apache License, Version 2.0\n", encoding="utf-8")
    return folder


def widen_tokenizer(folder: Path, ids: int) -> None:
    """Give the tokenizer of a folder words of its own, up to id `ids` - 1: it is another model's then."""
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    found["model"]["vocab"] |= {f"word{number}": number for number in range(VOCABULARY, ids)}
    path.write_text(json.dumps(found), encoding="utf-8")
