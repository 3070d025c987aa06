"""The plugin in vLLM: what feedback costs a token there, the first token, and how fast vLLM is beside `generate`.

The same App. A model, with random weights, in both; greedy, all candidates interleaved in one run and one process. Soft / Standard: seconds
of a whole batch of requests. First token: a prompt with one new token, Fused (1 feedback pass) against Standard. Speed: seconds of
`generate` on the batch against vLLM's.

    python -m benchmarks.in_vllm                      in an environment with vLLM (docs/serve.md); about three minutes
    python -m benchmarks.in_vllm --compile            with vLLM's compiled trunk
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import interleave
from fullband.costs import PAPER, fusion_share
from fullband.decode import generate
from fullband.model import FullBandModel
from fullband.presets import trunk_preset


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=11)
    parser.add_argument("--preset", default="10m", help="(default %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="requests at once (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--long-prompt", type=int, default=256, help="tokens of the prompt before a first token (default %(default)s)")
    parser.add_argument("--new", type=int, default=48, help="new tokens of a request (default %(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the trunk, as vLLM does by default")
    chosen = parser.parse_args(arguments)
    result = prepare(chosen) | measure(chosen)
    show("In vLLM", ("what", "ratio", "spread"), table(result), result, chosen.json)
    return result


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}  # in this process, whose clock is read
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    torch.manual_seed(chosen.seed)
    trunk = trunk_preset(chosen.preset)
    model = FullBandModel(trunk).eval()
    many, one, long = (
        torch.randint(trunk.vocab_size, (count, length)).tolist()
        for count, length in ((chosen.rows, chosen.prompt), (1, chosen.prompt), (1, chosen.long_prompt))
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder))
        llm = vllm.LLM(
            folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=not chosen.compile, max_num_seqs=chosen.rows,
            enable_prefix_caching=False, disable_log_stats=True,
        )  # fmt: skip

        def served(prompts: list[list[int]], mode: str, new: int) -> None:
            asked = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, extra_args={"mode": mode})
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)

        candidates: dict[str, Any] = {
            "standard_1": partial(served, one, "standard", chosen.new),
            "soft_1": partial(served, one, "soft", chosen.new),
            "standard_16": partial(served, many, "standard", chosen.new),
            "soft_16": partial(served, many, "soft", chosen.new),
            "first_standard": partial(served, long, "standard", 1),
            "first_fused": partial(served, long, "fused", 1),
            "generate_1": partial(generate, model, one, "soft", max_new_tokens=chosen.new),
            "generate_16": partial(generate, model, many, "soft", max_new_tokens=chosen.new),
        }
        timings = interleave(candidates, chosen.rounds, chosen.clock, "vLLM")
    pairs = {
        "soft_of_standard_1": ("soft_1", "standard_1"),
        "soft_of_standard_16": ("soft_16", "standard_16"),
        "first_token": ("first_fused", "first_standard"),
        "speed_1": ("generate_1", "soft_1"),
        "speed_16": ("generate_16", "soft_16"),
    }
    tokens = {name: chosen.new * (chosen.rows if name.endswith("16") else 1) for name in candidates if "first" not in name}
    return {
        "vllm": vllm.__version__,
        "fusion_share": fusion_share(trunk, PAPER, chosen.prompt + chosen.new),
        "tokens_per_second": {name: count / timings.best(name) for name, count in tokens.items()},
        "ratios": {name: {"ratio": timings.ratio(*pair), "spread": timings.spread(*pair)} for name, pair in pairs.items()},
    }


def table(result: dict[str, Any]) -> list[list[str]]:
    words = {
        "soft_of_standard_1": "Soft / Standard, one request",
        "soft_of_standard_16": "Soft / Standard, all at once",
        "first_token": "first token, Fused / Standard",
        "speed_1": "tokens a second in Soft, of generate's, one request",
        "speed_16": "the same, all at once",
    }
    found = result["ratios"].items()
    return [[words[name], f"{one['ratio']:.3f}x", " … ".join(f"{value:.2f}" for value in one["spread"])] for name, one in found]


if __name__ == "__main__":
    main()
