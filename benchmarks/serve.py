"""The running batch of `fullband serve`, without HTTP: what feedback costs a token, the first token, and throughput against `generate`.

All candidates are interleaved in one run, weights random, greedy. Soft / Standard: seconds of a whole batch of requests, by which the
ratio holds a token. First token: a prompt with one new token, Fused (1 feedback pass) against Standard. A beginning that is kept: the first
token of a long prompt and a new question, on a server that keeps prompts against one that does not. Throughput: 16 requests at once
against `generate` of the same 16 prompts as one batch. Targets: at most 1.03 plus the fusion's share of the FLOPs; 2.1; 1.2 times what the
question takes alone; at least 0.9.

    python -m benchmarks.serve                        about two minutes
    python -m benchmarks.serve --preset 100m --json - numbers for a machine
"""

from __future__ import annotations

import argparse
import queue
from functools import partial
from typing import Any

import torch

from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import interleave
from fullband.costs import PAPER, fusion_share
from fullband.data.tokenizers import ByteTokenizer
from fullband.decode import GenerateOptions, generate
from fullband.model import FullBandModel
from fullband.presets import trunk_preset
from fullband.serve.engine import LocalEngine
from fullband.serve.rows import Event, Request
from fullband.serve.scheduler import Scheduler


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=5)
    parser.add_argument("--preset", default="10m", help="(default %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="requests at once (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--long-prompt", type=int, default=256, help="tokens of the prompt before a first token (default %(default)s)")
    parser.add_argument("--new", type=int, default=48, help="new tokens of a request (default %(default)s)")
    chosen = parser.parse_args(arguments)
    result = prepare(chosen) | measure(chosen)
    show("Serving", ("what", "ratio", "spread", "target"), table(result), result, chosen.json)
    return result


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(chosen.seed)
    trunk = trunk_preset(chosen.preset)
    model = FullBandModel(trunk).eval()
    scheduler, keeping = (Scheduler(LocalEngine(model, prefix_bytes=kept), ByteTokenizer(), chosen.rows, 1024) for kept in (0, 2**30))

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(256, (count, length)).tolist()

    many, one, long = prompts(chosen.rows, chosen.prompt), prompts(1, chosen.prompt), prompts(1, chosen.long_prompt)

    def first(server: Scheduler, before: list[int], mode: str) -> None:
        serve(server, [before + prompts(1, chosen.prompt)[0]], mode, 1)

    candidates: dict[str, Any] = {
        "standard_1": partial(serve, scheduler, one, "standard", chosen.new),
        "soft_1": partial(serve, scheduler, one, "soft", chosen.new),
        "standard_16": partial(serve, scheduler, many, "standard", chosen.new),
        "soft_16": partial(serve, scheduler, many, "soft", chosen.new),
        "generate_16": partial(generate, model, many, "soft", max_new_tokens=chosen.new),
        "first_standard": partial(serve, scheduler, long, "standard", 1),
        "first_fused": partial(serve, scheduler, long, "fused", 1),
    }
    for mode in ("standard", "fused"):
        for name, server, before in (("alone", scheduler, []), ("anew", scheduler, long[0]), ("kept", keeping, long[0])):
            candidates[f"{name}_{mode}"] = partial(first, server, before, mode)
    timings = interleave(candidates, chosen.rounds, chosen.clock, "serving")
    scheduler.close(timeout=10)
    keeping.close(timeout=10)
    pairs = {
        "soft_of_standard_1": ("soft_1", "standard_1"),
        "soft_of_standard_16": ("soft_16", "standard_16"),
        "first_token": ("first_fused", "first_standard"),
        "kept_standard": ("kept_standard", "anew_standard"),
        "kept_fused": ("kept_fused", "anew_fused"),
        "throughput": ("generate_16", "soft_16"),
    }
    share = fusion_share(trunk, PAPER, chosen.prompt + chosen.new)
    alone = [1.2 * timings.ratio(f"alone_{mode}", f"anew_{mode}") for mode in ("standard", "fused")]
    wanted = [1.03 + share, 1.03 + share, 2.1, *alone, 0.9]
    return {
        "fusion_share": share,
        "targets": dict(zip(pairs, wanted, strict=True)),
        "tokens_per_second": {name: chosen.rows * chosen.new / timings.best(name) for name in ("standard_16", "soft_16", "generate_16")},
        "ratios": {name: {"ratio": timings.ratio(*pair), "spread": timings.spread(*pair)} for name, pair in pairs.items()},
    }


def serve(scheduler: Scheduler, prompts: list[list[int]], mode: str, new: int) -> None:
    """Submit all prompts at once and wait for the last token of each."""
    events: queue.Queue[Event] = queue.Queue()
    asked = GenerateOptions(mode=mode, max_new_tokens=new, stop_ids=())
    for prompt in prompts:
        scheduler.submit(Request(prompt, asked, events.put))
    left = len(prompts)
    while left:
        event = events.get()
        assert event.error is None, event.error
        left -= event.finish_reason is not None


def table(result: dict[str, Any]) -> list[list[str]]:
    words = {
        "soft_of_standard_1": "Soft / Standard, one request",
        "soft_of_standard_16": "Soft / Standard, all at once",
        "first_token": "first token, Fused / Standard",
        "kept_standard": "first token after a beginning that is kept / that is not, Standard",
        "kept_fused": "the same, Fused",
        "throughput": "tokens a second, of generate's",
    }
    rows = []
    for name, found in result["ratios"].items():
        sign = "≥" if name == "throughput" else "≤"
        spread = " … ".join(f"{value:.2f}" for value in found["spread"])
        rows.append([words[name], f"{found['ratio']:.3f}x", spread, f"{sign} {result['targets'][name]:.3f}"])
    return rows


if __name__ == "__main__":
    main()
