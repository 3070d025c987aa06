"""Training tokens a second: the App. A decoder with NorMuon and Adam against an equal-shape Hugging Face Llama with AdamW.

Equal shape: width, layers, heads, key-value heads, head dimension, GLU width, vocabulary, tied embedding; the Llama uses SDPA. The decoder
does more per token (norms on queries, keys and branch outputs, head gates) and per step (orthogonalised updates), and must not be slower
for it: target at least 1.0x. Two passes with a prefix at T/2 are shown beside it.

A step is some microbatches of forward, loss and backward, and one optimiser update. The parts are timed apart, interleaved, on the same
tokens, and added up: seconds = microbatches x microbatch + update. So one run tells what a step of any size costs; --tokens-per-step
is the one the headline uses (default: what a recipe has by default, 32 rows of 512).

    python -m benchmarks.train                             the 10m shape, microbatches of 4 x 512
    python -m benchmarks.train --tokens-per-step 4096      a small batch: the update weighs more
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import Timings, interleave
from fullband.config import OptimConfig, TrunkConfig
from fullband.feedback.loss import multipass_loss
from fullband.feedback.multipass import multipass
from fullband.model import FullBandModel
from fullband.optim import Optimizer
from fullband.presets import trunk_preset

TARGETS = {"throughput": 1.0}
STEPS = 1000  # the schedule needs a length


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=5)
    parser.add_argument("--preset", default="10m", help="shape of the trunk (default %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="rows in a microbatch (default %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="positions in a row (default %(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=16_384, help="tokens between two updates (default %(default)s)")
    chosen = parser.parse_args(arguments)
    about = prepare(chosen)
    shape = trunk_preset(chosen.preset)
    tokens_BT = torch.randint(shape.vocab_size, (chosen.rows, chosen.length))
    timings = interleave(build(chosen, shape, tokens_BT), chosen.rounds, chosen.clock, "training")
    result = about | {"targets": TARGETS} | summary(timings, tokens_BT.numel(), chosen.tokens_per_step)
    by_tokens = [str(tokens) for tokens in result["one_pass"]["throughput_ratio_by_tokens_per_step"]]
    rows = [
        [label, f"{r['tokens_per_second']:,.0f}", f"{r['throughput_ratio']:.2f}x", f"{r['update_seconds'] * 1e3:,.0f} ms"]
        + [f"{ratio:.2f}x" for ratio in r["throughput_ratio_by_tokens_per_step"].values()]
        for label, r in ((label, result[name]) for name, label in LABELS.items())
    ]
    title = f"Training, {chosen.preset} shape, {chosen.tokens_per_step:,} tokens a step (target {TARGETS['throughput']}x for one pass)"
    columns = ("model", "tokens/s", "of Llama", "update", *(f"at {int(tokens):,}" for tokens in by_tokens))
    show(title, columns, rows, result, chosen.json)
    return result


LABELS = {"llama": "Llama, AdamW", "one_pass": "decoder, NorMuon + Adam", "two_pass": "the same, two passes, p = T/2"}
UPDATES = {"llama": "llama_update", "one_pass": "update", "two_pass": "update"}


def summary(timings: Timings, tokens: int, tokens_per_step: int) -> dict[str, Any]:
    """Tokens a second of every model, and the ratios to the Llama's; `tokens` are those of a microbatch."""

    def rate(name: str, step: int) -> float:
        return step / (step / tokens * timings.best(name) + timings.best(UPDATES[name]))

    sizes = sorted({tokens, 4 * tokens, tokens_per_step, 4 * tokens_per_step})
    return {
        name: {
            "tokens_per_second": rate(name, tokens_per_step),
            "throughput_ratio": rate(name, tokens_per_step) / rate("llama", tokens_per_step),
            "throughput_ratio_by_tokens_per_step": {step: rate(name, step) / rate("llama", step) for step in sizes},
            "microbatch_seconds": timings.best(name),
            "update_seconds": timings.best(UPDATES[name]),
            "microbatch_spread": timings.spread("llama", name),
        }
        for name in LABELS
    }


def build(chosen: argparse.Namespace, shape: TrunkConfig, tokens_BT: Tensor) -> dict[str, Callable[[], object]]:
    """The parts of a step. Gradients add up from call to call, as they do over microbatches."""
    model = FullBandModel(shape.model_copy(update={"context": max(chosen.length, shape.context)}))
    llama = equal_shape_llama(shape, chosen.length)
    ours, theirs = Optimizer(model, OptimConfig(), STEPS), torch.optim.AdamW(llama.parameters(), lr=1e-4)
    return {
        "llama": partial(llama_microbatch, llama, tokens_BT),
        "one_pass": partial(decoder_microbatch, model, tokens_BT, []),
        "two_pass": partial(decoder_microbatch, model, tokens_BT, [chosen.length // 2]),
        "llama_update": theirs.step,
        "update": partial(ours.step, 0),
    }


def equal_shape_llama(shape: TrunkConfig, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.glu_width,
        max_position_embeddings=max(length, shape.context),
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).train()


def decoder_microbatch(model: FullBandModel, tokens_BT: Tensor, prefixes: list[int]) -> None:
    targets_BT = tokens_BT.roll(-1, dims=1)
    outputs = multipass(model, tokens_BT, list(prefixes))
    multipass_loss(outputs, model.trunk.head_weight, targets_BT, targets_BT.numel()).objective.backward()


def llama_microbatch(llama: nn.Module, tokens_BT: Tensor) -> None:
    llama(input_ids=tokens_BT, labels=tokens_BT).loss.backward()


if __name__ == "__main__":
    main()
