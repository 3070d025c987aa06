"""Self-speculation on code-like text: acceptance, passes and speed-up against plain Soft decoding, and mismatches, which must be 0.

Prompts are the beginnings of held-out documents of the running interpreter's own library, decoded greedily, one row at a time. The draft
is what followed the last tokens where they stood before (decode/speculate.py); a few parallel passes check it.

passes a token    passes of the check and steps, for each token made; plain decoding takes 1
acceptance        drafted tokens kept by a check, on average
mismatches        texts that differ from plain Soft's

    python -m benchmarks.speculate --model runs/text-2048
    python -m benchmarks.speculate --model runs/text-2048 --draft 4 8 16 --tolerance 1e-3 0 --new 256
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from benchmarks.held_out import held_out_documents
from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import interleave
from fullband.data.tokenizers import load_tokenizer
from fullband.decode import Speculation, SpeculationReport, collect, prefill, stream_from
from fullband.feedback.state import DecodeState
from fullband.model import FullBandModel, resolve_model_folder

TARGETS = {"mismatches": 0}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--model", required=True, help="a model folder, or a run folder (its newest checkpoint)")
    parser.add_argument("--texts", type=int, default=4, help="documents (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a document that are the prompt (default %(default)s)")
    parser.add_argument("--new", type=int, default=128, help="tokens made (default %(default)s)")
    parser.add_argument("--draft", type=int, nargs="+", default=[4, 8, 16], help="drafted tokens a check (default 4 8 16)")
    parser.add_argument("--max-passes", type=int, default=4, help="passes of a check at most (default %(default)s)")
    parser.add_argument("--tolerance", type=float, nargs="+", default=[1e-3], help="change below which a state holds (default 1e-3)")
    chosen = parser.parse_args(arguments)
    about = prepare(chosen)
    folder = resolve_model_folder(chosen.model)
    model, tokenizer = FullBandModel.load(folder), load_tokenizer(folder)
    if chosen.prompt + chosen.new > model.trunk.context:
        parser.error(f"--prompt and --new together exceed the model's context of {model.trunk.context}")
    documents = [tokenizer.encode(text) for text in held_out_documents()]
    prompts = [document[: chosen.prompt] for document in documents if len(document) >= chosen.prompt][: chosen.texts]
    settings = {
        f"draft {draft}, tolerance {tolerance:g}": Speculation(draft, chosen.max_passes, tolerance)
        for draft in chosen.draft
        for tolerance in chosen.tolerance
    }
    result = about | {"targets": TARGETS} | measure(chosen, model, prompts, settings)
    rows = [
        [name, f"{r['acceptance_length']:.2f}", f"{r['checks']} / {r['steps']}", f"{r['passes_per_token']:.2f}", *verdict(r)]
        for name, r in result["settings_tried"].items()
    ]
    title = f"Self-speculation, {len(prompts)} prompts of {chosen.prompt} tokens, {chosen.new} new (target: 0 mismatches)"
    show(title, ("setting", "acceptance", "checks / steps", "passes a token", "speed-up", "mismatches"), rows, result, chosen.json)
    return result


def verdict(r: dict[str, Any]) -> list[str]:
    return [f"{r['speed_up']:.2f}x", str(r["mismatches"])]


def measure(chosen: argparse.Namespace, model: FullBandModel, prompts: list[list[int]], settings: dict[str, Speculation]) -> dict[str, Any]:
    """The prompts are read beforehand: only what follows is compared and timed."""
    states = [prefill(model, [prompt]) for prompt in prompts]
    run = partial(continuations, model, states, prompts, chosen.new)
    plain, _ = run(None)
    tried: dict[str, Any] = {}
    for name, setting in settings.items():
        texts, reports = run(setting)
        passes = sum(report.passes for report in reports)
        checks = sum(report.checks for report in reports)
        tried[name] = {
            "acceptance_length": sum(report.kept for report in reports) / max(1, checks),
            "drafted": sum(report.drafted for report in reports),
            "checks": checks,
            "steps": sum(report.steps for report in reports),
            "passes_per_token": passes / (chosen.new * len(prompts)),
            "positions_per_token": sum(report.positions for report in reports) / (chosen.new * len(prompts)),
            "mismatches": sum(text != other for text, other in zip(texts, plain, strict=True)),
        }
    candidates = {"plain": partial(run, None)} | {name: partial(run, setting) for name, setting in settings.items()}
    timings = interleave(candidates, chosen.rounds, chosen.clock, "decoding", warm_up=False)
    for name in settings:
        tried[name] |= {"speed_up": timings.ratio("plain", name), "spread": timings.spread("plain", name)}
    return {"plain_tokens_per_second": chosen.new * len(prompts) / timings.best("plain"), "settings_tried": tried}


def continuations(
    model: FullBandModel, states: list[DecodeState], prompts: list[list[int]], new: int, speculation: Speculation | None
) -> tuple[list[list[int]], list[SpeculationReport]]:
    """Greedy Soft text behind every prompt, one after the other, and what speculation did for each."""
    texts, reports = [], []
    for state, prompt in zip(states, prompts, strict=True):
        steps = stream_from(model, state, "soft", prompts=[prompt], max_new_tokens=new, speculation=speculation)
        texts += [completion.tokens for completion in collect(steps)]
        reports.append(steps.speculation_report)
    return texts, reports


if __name__ == "__main__":
    main()
