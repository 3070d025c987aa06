"""What a feedback pass costs whose states enter inside the stack: the layers below the entry are computed once for all passes.

Forward and backward over the same tokens, medians of interleaved rounds. The trunk alone: a plain pass through all layers, and what lies
above the entry, from a stream that is there. Beside it a whole training step of two passes (fusion, head, loss) against one of one pass.
Read the table as multiples of the plain pass, or of the one-pass step. Target: (L - d)/L of a plain pass, within 0.05.

    python -m benchmarks.entry                             width 512, rows of 1,024, about a minute
    python -m benchmarks.entry --entry 2 --json -          numbers for a machine
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.multipass import training_step
from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import interleave
from fullband.config import TrunkConfig
from fullband.feedback.multipass import multipass_reference
from fullband.feedback_config import ConnectionConfig
from fullband.model import FullBandModel

TOLERANCE = 0.05


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=5)
    parser.add_argument("--layers", type=int, default=4, help="layers of the trunk (default %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="width of the trunk (default %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="positions in a row (default %(default)s)")
    parser.add_argument("--entry", type=int, default=2, help="depth at which states enter (default %(default)s)")
    chosen = parser.parse_args(arguments)
    about = prepare(chosen)
    result = about | measure(chosen)
    show("A feedback pass that enters inside the stack", COLUMNS, table(result), result, chosen.json)
    return result


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(chosen.seed)
    shape = TrunkConfig(
        vocab_size=512,
        width=chosen.width,
        layers=chosen.layers,
        heads=max(1, chosen.width // 64),
        kv_heads=max(1, chosen.width // 128),
        glu_width=4 * chosen.width,
        context=chosen.length,
        window=chosen.length,
    )
    model = FullBandModel(shape, ConnectionConfig(fusion="gated", entry=chosen.entry))
    tokens_1T = torch.randint(shape.vocab_size, (1, chosen.length))
    x_1TD = model.trunk.below(tokens_1T).x_BTD.detach()
    candidates = {
        "plain": partial(run, model, tokens_1T, None),
        "above": partial(run, model, tokens_1T, x_1TD),
        "one_pass_step": partial(training_step, model, tokens_1T, multipass_reference, []),
        "two_pass_step": partial(training_step, model, tokens_1T, multipass_reference, [0]),
    }
    timings = interleave(candidates, chosen.rounds, chosen.clock, f"entry {chosen.entry}")
    return {
        "layers": chosen.layers,
        "width": chosen.width,
        "length": chosen.length,
        "entry": chosen.entry,
        "target": (chosen.layers - chosen.entry) / chosen.layers,
        "tolerance": TOLERANCE,
        "pass": timings.ratio("above", "plain"),
        "pass_spread": timings.spread("above", "plain"),
        "step": timings.ratio("two_pass_step", "one_pass_step"),
        "step_spread": timings.spread("two_pass_step", "one_pass_step"),
        "plain_seconds": timings.best("plain"),
    }


def run(model: FullBandModel, tokens_1T: Tensor, x_1TD: Tensor | None) -> None:
    """Forward and backward of the trunk: all of it, or from a stream at the entry on."""
    x = model.trunk.below(tokens_1T).x_BTD if x_1TD is None else x_1TD.clone().requires_grad_()
    model.trunk.above(x).top_BTD.sum().backward()
    model.zero_grad(set_to_none=True)


COLUMNS = ("what", "cost", "spread", "target")


def table(result: dict[str, Any]) -> list[list[str]]:
    def spread(name: str) -> str:
        return " … ".join(f"{value:.2f}" for value in result[name])

    share = f"{result['target']:.2f} ± {TOLERANCE}"
    return [
        [f"a pass from depth {result['entry']} of {result['layers']}", f"{result['pass']:.2f}x", spread("pass_spread"), share],
        ["a step of two passes", f"{result['step']:.2f}x", spread("step_spread"), ""],
    ]


if __name__ == "__main__":
    main()
