"""What a training step with latent feedback costs: exact prefix reuse against K full passes.

One step is forward, loss and backward over the same tokens. With the prefix mixin, positions up to p of a later pass are plain, so
their states and keys are pass 1's: reuse runs only the suffix (feedback/multipass.py), the naive way runs all positions again.
p is uniform over 0 ... T-2; it is measured at the middle of equally likely strata (for three passes, the strata of p_2 and p_3 are
paired by a seeded permutation) and averaged.

Read the table as multiples of a one-pass step. The headline is (reuse - 1) / (naive - 1): the share of the extra cost that is left.
Target: at most 0.55 in time; at p = T/2 at most 1.6x the memory of one pass.

    python -m benchmarks.multipass                         both lengths, a few minutes
    python -m benchmarks.multipass --length 512 --json -   numbers for a machine
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.peak_memory import METHOD, peak_bytes
from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import Timings, interleave
from fullband.feedback.loss import multipass_loss
from fullband.feedback.multipass import Jitter, multipass, multipass_reference
from fullband.model import FullBandModel
from fullband.presets import trunk_preset

TARGETS = {"time": 0.55, "memory": 1.6}
Step = Callable[[], None]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--preset", default="10m", help="shape of the trunk (default %(default)s)")
    parser.add_argument("--length", type=int, nargs="+", default=[512, 2048], help="positions in a row (default 512 2048)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens in a step, in whole rows, at least one (default %(default)s)")
    parser.add_argument("--strata", type=int, default=4, help="values of p (default %(default)s)")
    chosen = parser.parse_args(arguments)
    about = prepare(chosen)
    lengths = {str(length): measure(chosen, length) for length in chosen.length}
    result = about | {"targets": TARGETS, "memory_method": METHOD} | next(iter(lengths.values())) | {"lengths": lengths}
    show("A step of K passes, in one-pass steps", COLUMNS, [row for n, r in lengths.items() for row in table(n, r)], result, chosen.json)
    return result


def measure(chosen: argparse.Namespace, length: int) -> dict[str, Any]:
    """Time and memory ratios for rows of `length`."""
    torch.manual_seed(chosen.seed)
    shape = trunk_preset(chosen.preset)
    model = FullBandModel(shape.model_copy(update={"context": max(length, shape.context)}))
    rows = max(1, chosen.tokens // length)
    tokens_BT = torch.randint(shape.vocab_size, (rows, length))
    step = partial(training_step, model, tokens_BT)
    middles = [int((i + 0.5) / chosen.strata * (length - 1)) for i in range(chosen.strata)]
    pairs = list(zip(middles, [middles[i] for i in torch.randperm(chosen.strata).tolist()], strict=True))
    half = length // 2
    candidates: dict[str, Step] = {
        "one_pass": partial(step, multipass, []),
        "naive_two_pass": partial(step, multipass_reference, [half]),
        "naive_three_pass": partial(step, multipass_reference, [half, half]),
    }
    candidates |= {f"reuse_two_pass {p}": partial(step, multipass, [p]) for p in middles}
    candidates |= {f"reuse_three_pass {p} {q}": partial(step, multipass, [p, q]) for p, q in pairs}
    memory = {name: peak_bytes(run) for name, run in memory_candidates(step, half).items()}
    timings = interleave(candidates, chosen.rounds, chosen.clock, f"length {length}", warm_up=False)
    return summary(timings, memory) | {"rows": rows, "prefixes": {"two_pass": middles, "three_pass": [list(pair) for pair in pairs]}}


def training_step(model: FullBandModel, tokens_BT: Tensor, passes: Any, prefixes: list[int]) -> None:
    """Forward, loss and backward; the gradients are dropped."""
    jitter = Jitter(sigma=0.02, seed=0, step=0, rows=torch.arange(len(tokens_BT)))
    outputs = passes(model, tokens_BT, prefixes, jitter=jitter)
    targets_BT = tokens_BT.roll(-1, dims=1)
    multipass_loss(outputs, model.trunk.head_weight, targets_BT, targets_BT.numel()).objective.backward()
    model.zero_grad(set_to_none=True)


def memory_candidates(step: Callable[..., None], half: int) -> dict[str, Step]:
    return {
        "one_pass": partial(step, multipass, []),
        "reuse_two_pass": partial(step, multipass, [half]),
        "reuse_two_pass_worst": partial(step, multipass, [0]),
        "naive_two_pass": partial(step, multipass_reference, [half]),
        "reuse_three_pass": partial(step, multipass, [half, half]),
        "reuse_three_pass_worst": partial(step, multipass, [0, 0]),
        "naive_three_pass": partial(step, multipass_reference, [half, half]),
    }


def summary(timings: Timings, memory: dict[str, int]) -> dict[str, Any]:
    base = timings.best("one_pass")
    result: dict[str, Any] = {"one_pass_seconds": base, "extra_cost_left": {}, "spread": {}, "by_prefix": {}}
    for kind in ("two_pass", "three_pass"):
        strata = [name for name in timings.seconds if name.startswith(f"reuse_{kind}")]
        result[f"reuse_{kind}"] = fmean(timings.best(name) for name in strata) / base
        result[f"naive_{kind}"] = timings.ratio(f"naive_{kind}", "one_pass")
        result["extra_cost_left"][kind] = (result[f"reuse_{kind}"] - 1) / (result[f"naive_{kind}"] - 1)
        result["by_prefix"][kind] = {name.partition(" ")[2]: timings.ratio(name, "one_pass") for name in strata}
        result["spread"][f"naive_{kind}"] = timings.spread(f"naive_{kind}", "one_pass")
        spreads = [timings.spread(name, "one_pass") for name in strata]
        result["spread"][f"reuse_{kind}"] = [fmean(part) for part in zip(*spreads, strict=True)]
    one = memory["one_pass"]
    result["peak_memory"] = {"one_pass_bytes": one} | {name: size / one for name, size in memory.items() if name != "one_pass"}
    return result


COLUMNS = ("length", "passes", "naive", "reuse", "extra cost left", "memory naive", "memory p = T/2", "memory p = 0")


def table(length: str, result: dict[str, Any]) -> list[list[str]]:
    memory = result["peak_memory"]
    one = [length, "1", f"{result['one_pass_seconds']:.3f} s", "", "", f"{memory['one_pass_bytes'] / 2**20:.0f} MiB", "", ""]
    rows = [one]
    for number, kind in (("2", "two_pass"), ("3", "three_pass")):
        left = f"{result['extra_cost_left'][kind]:.2f} (target {TARGETS['time']})"
        times = [f"{result[f'{way}_{kind}']:.2f}x" for way in ("naive", "reuse")]
        peaks = [f"{memory[name]:.2f}x" for name in (f"naive_{kind}", f"reuse_{kind}", f"reuse_{kind}_worst")]
        rows.append([length, number, *times, left, *peaks])
    return rows


if __name__ == "__main__":
    main()
