"""Scoring the choices of questions: their context read once for all of them, against a row for every choice.

A question is a context of `--context` tokens with `--choices` endings of `--ending` tokens; 60 tokens are a question alone, 600 one behind
five examples. Both ways read batches of `--batch-rows` rows; the largest difference of a log-likelihood, and the positions that the trunk
computes, stand beside the time.

    python -m benchmarks.choices
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.report import options, prepare, show
from benchmarks.side_by_side import interleave
from fullband.evaluate.harness import scoring
from fullband.evaluate.harness.scoring import Continuation, Score, score_continuations
from fullband.evaluate.harness.states import Scoring
from fullband.model import FullBandModel
from fullband.presets import trunk_preset
from fullband.trunk.residual import runs_watched


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--preset", default="10m", help="(default %(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[60, 600], help="tokens before the choices (default 60 600)")
    parser.add_argument("--questions", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--choices", type=int, default=4, help="of a question (default %(default)s)")
    parser.add_argument("--ending", type=int, default=8, help="tokens of a choice (default %(default)s)")
    parser.add_argument("--batch-rows", type=int, default=8, help="(default %(default)s)")
    chosen = parser.parse_args(arguments)
    about = prepare(chosen)
    model = FullBandModel(trunk_preset(chosen.preset)).eval()
    measured: dict[str, Any] = {}
    for context in chosen.context:
        for way in (0, 1, "soft"):
            name = f"{context} tokens, {'Soft' if way == 'soft' else f'{way} passes'}"
            measured[name] = measure(model, questions(chosen, context, model.trunk.vocab_size), way, chosen, name)
    rows = [
        [name, f"{r['whole_seconds']:.2f} s", f"{r['time_ratio']:.2f}x", f"{r['positions_ratio']:.2f}x", f"{r['largest_difference']:.0e}"]
        for name, r in measured.items()
    ]
    result = about | {"questions": measured}
    title = f"{chosen.questions} questions of {chosen.choices} choices, contexts computed once, of a row for every choice"
    show(title, ("context, scored by", "every row", "time", "positions", "differ (nats)"), rows, result, chosen.json)
    return result


def questions(chosen: Any, context: int, vocabulary: int) -> list[Continuation]:
    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,)).tolist())

    return [Continuation(one, ids(chosen.ending)) for one in (ids(context) for _ in range(chosen.questions)) for _ in range(chosen.choices)]


def measure(model: FullBandModel, asked: list[Continuation], way: Scoring, chosen: Any, label: str) -> dict[str, Any]:
    shared = partial(score_continuations, model, asked, [way], chosen.batch_rows)
    candidates = {"shared": shared, "whole": partial(every_row, shared)}
    scores, positions = {}, {}
    for name, run in candidates.items():
        with counted(model) as count:
            scores[name] = [score[way].log_likelihood for score in run()]
        positions[name] = sum(count)
    timings = interleave(candidates, chosen.rounds, chosen.clock, label, warm_up=False)
    return {
        "whole_seconds": timings.best("whole"),
        "time_ratio": timings.ratio("shared", "whole"),
        "spread": timings.spread("shared", "whole"),
        "positions_ratio": positions["shared"] / positions["whole"],
        "largest_difference": max(abs(a - b) for a, b in zip(scores["shared"], scores["whole"], strict=True)),
    }


def every_row(score: partial[list[dict[Scoring, Score]]]) -> list[dict[Scoring, Score]]:
    """The reference: no scoring shares anything."""
    with mock.patch.object(scoring, "shareable", lambda model, scorings: ([], list(scorings))):
        return score()


@contextmanager
def counted(model: FullBandModel) -> Iterator[list[int]]:
    """Positions that the trunk computes, a number for each call."""
    found: list[int] = []
    with runs_watched(model.trunk, lambda x_BTD: found.append(x_BTD.shape[0] * x_BTD.shape[1])):
        yield found


if __name__ == "__main__":
    main()
