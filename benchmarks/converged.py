"""Converged reading on a trained model: passes, error and executed FLOPs, against exact reading and whole-sequence passes.

Texts are the held-out documents of the running interpreter's own library, one row each. For every length T:

exact        position by position (Eq. 8): T positions, one after another
converged    a window of positions, committed once they stop moving (feedback/converged.py), at each tolerance
whole        passes over all T positions: how many until no state is further from exact than converged reading's worst one, and until
             none is further than 1e-3

Error of a state is ‖h - h_exact‖ / ‖h_exact‖; the worst position counts. Executed FLOPs are those of the positions the trunk computed;
converged reading does not beat exact in them but in how many run at once. Targets: an error of at most 1e-3 in at most 16 passes, and fewer
FLOPs than whole-sequence passes of the same error.

    fullband train recipes/text-2048.yaml --set output=runs/text-2048
    python -m benchmarks.converged --model runs/text-2048
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.held_out import held_out_documents
from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import interleave
from fullband.costs import pass_flops
from fullband.data.tokenizers import load_tokenizer
from fullband.feedback.by_passes import iterate_passes, top_states
from fullband.feedback.converged import MAX_PASSES, WINDOW, Converged, run_converged
from fullband.feedback.passes import below
from fullband.model import FullBandModel, resolve_model_folder

TARGETS = {"error": 1e-3, "passes": 16}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--model", required=True, help="a model folder, or a run folder (its newest checkpoint)")
    parser.add_argument("--length", type=int, nargs="+", default=[128, 256, 512, 1024, 2048], help="positions in a row, within the context")
    parser.add_argument("--texts", type=int, default=2, help="rows of each length, read one by one (default %(default)s)")
    parser.add_argument("--tolerance", type=float, nargs="+", default=[1e-2, 1e-3, 1e-4], help="(default 1e-2 1e-3 1e-4)")
    parser.add_argument("--window", type=int, default=WINDOW, help="positions refined together (default %(default)s)")
    parser.add_argument(
        "--max-passes", type=int, default=MAX_PASSES, help="a position's, before its row is read exactly (default %(default)s)"
    )
    parser.add_argument("--whole-passes", type=int, default=32, help="whole-sequence passes tried at most (default %(default)s)")
    chosen = parser.parse_args(arguments)
    about = prepare(chosen)
    folder = resolve_model_folder(chosen.model)
    model, tokenizer = FullBandModel.load(folder), load_tokenizer(folder)
    lengths = [length for length in chosen.length if length <= model.trunk.context]
    if not lengths:
        parser.error(f"the model's context is {model.trunk.context}: no length fits")
    documents = [tokenizer.encode(text) for text in held_out_documents()]
    measured = {str(length): measure(chosen, model, documents, length) for length in lengths}
    result = about | {"targets": TARGETS, "context": model.trunk.context, "lengths": measured}
    rows = [row for length, r in measured.items() for row in table(length, r)]
    columns = ("T", "reading", "passes", "worst error", "median", "positions / T", "GFLOPs", "seconds")
    show(f"Converged reading, context {model.trunk.context}", columns, rows, result, chosen.json)
    return result


@dataclass(frozen=True)
class Reading:
    """One text read in one way; errors are relative, over positions."""

    passes: int
    worst: float
    median: float
    positions: int
    exact_from: int = -1


@torch.no_grad()
def measure(chosen: argparse.Namespace, model: FullBandModel, documents: list[list[int]], length: int) -> dict[str, Any]:
    """Means over the texts, for rows of `length`."""
    long_enough = [document for document in documents if len(document) >= length][: chosen.texts]
    if not long_enough:
        raise SystemExit(f"no held-out document has {length} tokens")
    texts = [torch.tensor([document[:length]]) for document in long_enough]
    settings = {"window": chosen.window, "max_passes": chosen.max_passes}
    readings: dict[str, list[Reading]] = {}
    for tokens_1T in texts:
        exact_TD = top_states(model, tokens_1T, "exact")[0]
        whole = list(whole_passes(model, tokens_1T, exact_TD, chosen.whole_passes))
        readings.setdefault("exact", []).append(Reading(length, 0.0, 0.0, length))
        readings.setdefault("whole to 1e-3", []).append(first_within(whole, TARGETS["error"]))
        for tolerance in chosen.tolerance:
            found = converge(model, tokens_1T, tolerance, settings)
            worst, median = errors(found.top_BTD[0], exact_TD)
            report, exact_from = found.report, int(found.report.exact_from_B[0])
            reading = Reading(int(report.passes_B[0]), worst, median, report.executed_positions, exact_from)
            readings.setdefault(f"converged {tolerance:g}", []).append(reading)
            readings.setdefault(f"whole like {tolerance:g}", []).append(first_within(whole, worst))
    candidates: dict[str, Any] = {"exact": partial(top_states, model, texts[0], "exact")}
    for tolerance in chosen.tolerance:
        candidates[f"converged {tolerance:g}"] = partial(converge, model, texts[0], tolerance, settings)
        passes = readings[f"whole like {tolerance:g}"][0].passes
        candidates[f"whole like {tolerance:g}"] = partial(run_whole, model, texts[0], passes)
    timings = interleave(candidates, chosen.rounds, chosen.clock, f"length {length}")
    flops = pass_flops(model.config.trunk, model.config.connection, length, fused=True)
    return {
        name: {
            "passes": fmean(r.passes for r in rows),
            "worst_error": max(r.worst for r in rows),
            "median_error": fmean(r.median for r in rows),
            "positions_per_token": fmean(r.positions / length for r in rows),
            "flops": fmean(r.positions for r in rows) * (flops.forward - flops.head),
            "read_exactly_from": [r.exact_from for r in rows],
            "seconds": timings.best(name) if name in timings.seconds else None,
        }
        for name, rows in readings.items()
    }


def converge(model: FullBandModel, tokens_1T: Tensor, tolerance: float, settings: dict[str, int]) -> Converged:
    return run_converged(model, below(model, tokens_1T)[0], tolerance=tolerance, **settings)


def whole_passes(model: FullBandModel, tokens_1T: Tensor, exact_TD: Tensor, most: int) -> Iterator[Reading]:
    """After 1, 2, … passes over all positions, the plain one included."""
    for number, states_1TD in enumerate(islice(iterate_passes(model, below(model, tokens_1T)[0]), most), start=1):
        yield Reading(number, *errors(states_1TD[0], exact_TD), number * tokens_1T.shape[1])


def run_whole(model: FullBandModel, tokens_1T: Tensor, passes: int) -> None:
    for _ in islice(iterate_passes(model, below(model, tokens_1T)[0]), passes):
        pass


def first_within(readings: list[Reading], error: float) -> Reading:
    """The first of them at most `error` from exact, else the last: read its error beside it."""
    return next((reading for reading in readings if reading.worst <= error), readings[-1])


def errors(states_TD: Tensor, exact_TD: Tensor) -> tuple[float, float]:
    """(worst, median) over positions."""
    error_T = (states_TD - exact_TD).norm(dim=-1) / exact_TD.norm(dim=-1)
    return float(error_T.max()), float(error_T.median())


def table(length: str, measured: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, r in measured.items():
        seconds = "" if r["seconds"] is None else f"{r['seconds']:.2f}"
        error = f"{r['worst_error']:.1e}", f"{r['median_error']:.1e}"
        rows.append([length, name, f"{r['passes']:.1f}", *error, f"{r['positions_per_token']:.2f}", f"{r['flops'] / 1e9:.2f}", seconds])
    return rows


if __name__ == "__main__":
    main()
