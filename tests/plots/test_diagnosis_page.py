"""The parts of a diagnosis's page and figures that a healthy model does not show."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fullband.plots.diagnosis_page import cells_of, needed_text, pass_ticks, plot_response, response
from fullband.plots.reachability import reach_text


def test_a_nudge_that_nothing_carries_on_is_drawn() -> None:
    """A converted model before training: its fusion is closed, and the distance is 0 from the first step on."""
    gone = {"distance": [0.02, 0.0, 0.0], "growth": 5e-4}
    drawn = response({"perturbation": {"sigma": 0.02, "position": 3, "along_positions": gone, "over_passes": None}})
    assert "along positions x 0.0005 in each" in drawn and "data-chart" in drawn


@pytest.mark.parametrize("growth", [math.inf, None])
def test_a_response_that_overflows_is_drawn(growth: float | None, tmp_path: Path) -> None:
    away = {"distance": [1e30, math.inf, None, math.nan], "growth": growth}
    found = {"perturbation": {"sigma": 1e30, "position": 3, "along_positions": away, "over_passes": away}}
    assert "data-chart" in response(found)
    plot_response(found, [tmp_path / "response.png"])


def test_the_rule_of_reachability_names_the_layer_that_is_fed_back() -> None:
    grid = {"mode": "standard", "layers": [0, 1, 2], "unexpected": 0, "influence": []}
    assert reach_text({"reach": [grid]}) == "as Eqs. 2 and 7 say" == reach_text({"reach": [grid | {"carried": 2}]})
    assert reach_text({"reach": [grid | {"carried": 1}]}) == "as Eqs. 2 and 7 say where layer 1 is fed back instead of the top one"


def test_states_out_of_reach_are_put_down_to_what_hides_them() -> None:
    """Windows only where the plain pass, without feedback, misses states as well."""
    rows = {"open": [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], "below": [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]}
    rows |= {"window": [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], "none": [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]}

    def said(standard: str, soft: str) -> str:
        both = {"layers": [0, 1], "unexpected": 1}
        grids = [{"mode": mode, "influence": [rows["none"], rows[kind]]} | both for mode, kind in (("standard", standard), ("soft", soft))]
        return reach_text({"reach": grids})

    assert "fusion, which is still closed" in said("below", "below") and "windows" not in said("below", "below")
    assert "windows" in said("window", "open") and "closed" not in said("window", "open")
    assert "should not reach" in said("open", "open")
    assert "gradients" in said("below", "open")


@pytest.mark.parametrize(("first", "last"), [(1, 2), (2, 9), (1, 32), (2, 48), (2, 1000)])
def test_passes_are_named_from_the_first_on(first: int, last: int) -> None:
    ticks = pass_ticks(first, last)
    assert ticks[0] == first and ticks[-1] <= last and ticks == sorted(set(ticks)) and len(ticks) <= 11


def test_what_was_not_measured_is_a_dash() -> None:
    record = {"k": 1, "loss": 2.0, "loss_past": None, "change": None, "change_past": None, "change_front": None}
    cells = cells_of(record | {"gap_loss": 0.5, "gap_state_past": None, "gap_kl_past": None})
    assert cells == ["1", "2", "–", "–", "–", "–", "–", "–", "0.5", "–", "–"]
    assert needed_text({"passes_needed": {"0.1": 4, "0.01": None}}) == "0.1: 4, 0.01: not reached"
