"""When feedback paid is told by held-out loss."""

from __future__ import annotations

from typing import Any

import pytest

from fullband.plots.runs_page import held_out_crossover


def evaluations(*losses: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"step": 10 * n + 9, "losses": {"0": plain, "1": fed}} for n, (plain, fed) in enumerate(losses)]


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (evaluations((3.0, 3.5), (2.5, 2.4), (2.2, 2.0)), "20"),
        (evaluations((3.0, 2.9), (2.5, 2.6)), "not yet"),
        (evaluations((3.0, 2.9), (2.5, 2.6), (2.2, 2.1)), "30"),
        ([], "not evaluated"),
    ],
)
def test_it_is_where_feedback_came_to_stay_below_plain_reading(found: list[dict[str, Any]], step: str) -> None:
    assert held_out_crossover(found) == step
