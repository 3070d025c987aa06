"""Decoding: what a fed-back token costs, and how fast tokens come, against transformers and against the memory's bandwidth.

Three questions, each with its candidates interleaved in one run, weights random, greedy:

soft / standard   seconds a token, head included, one row, step by step. Target: at most 1.01x where the fusion's share of the FLOPs
                  (fullband.costs) is under 0.5%, else at most 1 + share + 1%
first token       reading a prompt and choosing a token: Fused (1 feedback pass) against Standard
throughput        whole calls, prompt to last token, against transformers' `generate` with a static cache on an equal-shape Llama
                  (target: at least 1.5x), and against the bound: the weights' bytes once a token through matrix-vector products and
                  nothing else. `generate` is the library's own; `static` is the same in fixed buffers (decode/static.py), also with
                  bf16 and int8 weights (int8 if torchao is there; its bound is that of its bytes) and, with --compile, compiled

    python -m benchmarks.decode                                    a few minutes
    python -m benchmarks.decode --preset 10m --compile --json -    compiling ours and transformers' takes minutes more
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import interleave
from benchmarks.train import equal_shape_llama
from fullband.costs import fusion_share
from fullband.decode import generate, prefill, resolve_mode, step
from fullband.decode.quantize import quantize, weight_bytes
from fullband.model import FullBandModel
from fullband.presets import trunk_preset

TARGETS = {"soft_over_standard": "1.01, or 1 + share + 0.01 where the share is 0.5% or more", "throughput_of_transformers": 1.5}
FEW = 4  # tokens timed at once where a few per cent count: the minimum over many short runs is the steadiest


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=5)
    parser.add_argument("--preset", nargs="+", default=["10m", "100m"], help="shapes of the trunk (default 10m 100m)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="rows decoded together (default 1 16)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens in a prompt (default %(default)s)")
    parser.add_argument("--new", type=int, default=32, help="tokens made (default %(default)s)")
    parser.add_argument("--long-prompt", type=int, default=256, help="prompt of the first token's time (default %(default)s)")
    parser.add_argument("--compile", action="store_true", help="also compiled steps, ours and transformers'")
    chosen = parser.parse_args(arguments)
    about = prepare(chosen)
    presets = {name: measure(chosen, name) for name in chosen.preset}
    result = about | {"targets": TARGETS, "presets": presets}
    rows = [row for name, measured in presets.items() for row in table(name, measured)]
    show("Decoding", ("preset", "what", "measured", "ratio", "target", "of the bandwidth bound"), rows, result, chosen.json)
    return result


@torch.no_grad()
def measure(chosen: argparse.Namespace, name: str) -> dict[str, Any]:
    torch.manual_seed(chosen.seed)
    model = FullBandModel(trunk_preset(name)).eval()
    return {
        "soft_over_standard": soft_over_standard(chosen, model, name),
        "first_token": first_token(chosen, model, name),
        "batches": {str(rows): throughput(chosen, model, name, rows) for rows in chosen.batch},
    }


def soft_over_standard(chosen: argparse.Namespace, model: FullBandModel, name: str) -> dict[str, Any]:
    state = prefill(model, random_tokens(model, 1, chosen.prompt))

    def tokens(mode_name: str) -> None:
        mode, after = resolve_mode(mode_name), state
        for _ in range(FEW):
            after = step(model, after, most_likely(model, after.top_BD), mode)

    candidates = {mode: partial(tokens, mode) for mode in ("standard", "soft")}
    timings = interleave(candidates, 12 * chosen.rounds, chosen.clock, f"{name}, soft and standard")
    shape = model.config.trunk
    share = fusion_share(shape, model.config.connection, chosen.prompt + FEW // 2)
    return {
        "standard_seconds": timings.best("standard") / FEW,
        "soft_seconds": timings.best("soft") / FEW,
        "ratio": timings.ratio("soft", "standard"),
        "spread": timings.spread("soft", "standard"),
        "fusion_share": share,
        "target": 1.01 if share < 0.005 else 1 + share + 0.01,
    }


def first_token(chosen: argparse.Namespace, model: FullBandModel, name: str) -> dict[str, Any]:
    prompt = random_tokens(model, 1, chosen.long_prompt)

    def first(feedback_passes: int) -> None:
        most_likely(model, prefill(model, prompt, feedback_passes).top_BD)

    candidates = {"standard": partial(first, 0), "fused": partial(first, 1)}
    timings = interleave(candidates, chosen.rounds, chosen.clock, f"{name}, first token")
    return {
        "prompt": chosen.long_prompt,
        "standard_seconds": timings.best("standard"),
        "fused_seconds": timings.best("fused"),
        "ratio": timings.ratio("fused", "standard"),
        "spread": timings.spread("fused", "standard"),
    }


def throughput(chosen: argparse.Namespace, model: FullBandModel, name: str, rows: int) -> dict[str, Any]:
    """Tokens a second of all candidates for `rows` prompts."""
    prompts = random_tokens(model, rows, chosen.prompt)
    models = {"static": model, "static_bf16": copy.deepcopy(model).bfloat16()}
    if (int8 := quantized(model)) is not None:
        models["static_int8"] = int8
    candidates: dict[str, Callable[[], object]] = {
        "transformers": llama_generate(model, prompts, chosen.new),
        "generate": partial(generate, model, prompts, max_new_tokens=chosen.new),
        **{way: partial(generate, each, prompts, max_new_tokens=chosen.new, static=True) for way, each in models.items()},
        "bound": partial(stream_weights, model, chosen.new),
    }
    if chosen.compile:
        candidates["transformers_compiled"] = llama_generate(model, prompts, chosen.new, compiled=True)
        for way in [way for way in models if way != "static_bf16"]:
            compiled = partial(generate, models[way], prompts, max_new_tokens=chosen.new, compile=True)
            candidates[way.replace("static", "compiled")] = compiled
    timings = interleave(candidates, chosen.rounds, chosen.clock, f"{name}, batch {rows}")
    whole = weight_bytes(model)
    result: dict[str, Any] = {"bytes": {way: weight_bytes(each) for way, each in models.items()}}
    for way in candidates:
        weights = models.get(way.replace("compiled", "static"), model)
        result[way] = {
            "tokens_per_second": rows * chosen.new / timings.best(way),
            "of_transformers": timings.ratio("transformers", way),
            "spread": timings.spread("transformers", way),
            "of_bound": timings.ratio("bound", way) * weight_bytes(weights) / whole,
        }
    result["bandwidth_bytes_per_second"] = whole * chosen.new / timings.best("bound")
    return result


def random_tokens(model: FullBandModel, rows: int, length: int) -> Tensor:
    return torch.randint(model.trunk.vocab_size, (rows, length))


def most_likely(model: FullBandModel, top_BD: Tensor) -> Tensor:
    return F.linear(top_BD, model.trunk.head_weight).argmax(dim=-1)


def stream_weights(model: FullBandModel, times: int) -> None:
    """Every matrix times a vector; the embedding once, as the head."""
    for _ in range(times):
        for weight in model.parameters():
            if weight.dim() == 2:
                torch.mv(weight, weight[0])


def quantized(model: FullBandModel) -> FullBandModel | None:
    try:
        return quantize(copy.deepcopy(model), "int8")
    except ValueError:  # torchao is not installed
        return None


def llama_generate(model: FullBandModel, prompts: Tensor, new: int, compiled: bool = False) -> Callable[[], object]:
    """transformers' greedy `generate` with a static cache, for an equal-shape Llama."""
    from transformers import CompileConfig

    llama: Any = equal_shape_llama(model.config.trunk, prompts.shape[1] + new).eval()
    llama.config.use_cache = True
    settings: dict[str, Any] = {"use_cache": True, "cache_implementation": "static", "do_sample": False, "pad_token_id": 0}
    settings |= {"max_new_tokens": new, "min_new_tokens": new, "eos_token_id": None, "disable_compile": not compiled}
    if compiled:
        settings["compile_config"] = CompileConfig(mode="default")
        settings["compile_config"]._compile_all_devices = True  # by itself it compiles on GPUs only
    return partial(llama.generate, prompts, attention_mask=torch.ones_like(prompts), **settings)


def table(name: str, measured: dict[str, Any]) -> list[list[str]]:
    soft, first = measured["soft_over_standard"], measured["first_token"]
    seconds = f"{soft['soft_seconds'] * 1e3:.2f} / {soft['standard_seconds'] * 1e3:.2f} ms"
    what = f"soft / standard token (share {soft['fusion_share']:.2%})"
    rows = [[name, what, seconds, f"{soft['ratio']:.3f}x", f"≤ {soft['target']:.3f}x", ""]]
    seconds = f"{first['fused_seconds'] * 1e3:.0f} / {first['standard_seconds'] * 1e3:.0f} ms"
    rows.append([name, f"fused / standard first token after {first['prompt']}", seconds, f"{first['ratio']:.2f}x", "", ""])
    for batch, ways in measured["batches"].items():
        for way, r in ways.items():
            if isinstance(r, dict) and "tokens_per_second" in r:
                speed, ratio, bound = f"{r['tokens_per_second']:,.1f} tokens/s", f"{r['of_transformers']:.2f}x", f"{r['of_bound']:.0%}"
                target = f"≥ {TARGETS['throughput_of_transformers']}x" if way in ("generate", "static", "compiled") else ""
                rows.append([name, f"batch {batch}: {way.replace('_', ' ')}", speed, ratio, target, bound])
    return rows


if __name__ == "__main__":
    main()
