"""Means, intervals, paired comparisons: from plain numbers, against scipy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from experiments.grids import GRID
from fullband.evaluate.statistics import mean_estimate
from fullband.experiments.config import Experiment, find_experiment, load_experiment
from fullband.experiments.jobs import jobs_of
from fullband.experiments.report import chance_of, readme
from fullband.experiments.summary import STUDENT, half_width, shows, summarise
from fullband.plots.experiment import look, plot_experiment
from fullband.strict import parse

TOY = parse(Experiment, GRID, "toy")


def result(cell: str, seed: int, readings: dict[str, float], **more: Any) -> dict[str, Any]:
    counts = ("steps", "tokens", "token_equivalent", "executed_positions", "executed_flops", "seconds", "processor_seconds")
    training = {key: 100 + seed for key in counts} | {"resumed": False, "switch_on_shock": None, "crossover_step": None}
    hardware = {"device": "CPU", "machine": "Linux", "cores": 2, "threads": 1, "versions": {"torch": "2"}}
    values = {reading: {"3": value, "12": value / 2} for reading, value in readings.items()}
    found = {"cell": cell, "seed": seed, "values": values, "verdict": None, "training": training, "measuring_seconds": 60.0 * (seed + 1)}
    return found | {"hardware": hardware} | more


def grid(fed: list[float], plain: list[float]) -> list[dict[str, Any]]:
    found = [result("fed", seed, {"exact": value}) for seed, value in enumerate(fed)]
    return found + [result("plain", seed, {"standard": value}) for seed, value in enumerate(plain)]


def test_the_quantiles_are_students() -> None:
    from scipy.stats import t

    expected = [t.ppf(0.975, freedom) for freedom in range(1, 31)]
    assert pytest.approx(expected, abs=5e-4) == STUDENT


def test_intervals_are_scipys() -> None:
    from scipy.stats import sem, t

    values = [0.8, 0.95, 0.7, 0.9]
    low, high = t.interval(0.95, 3, loc=0, scale=sem(values))
    assert half_width(mean_estimate(values)) == pytest.approx((high - low) / 2, rel=1e-4)
    assert half_width(mean_estimate([0.5])) is None


def test_differences_are_paired_by_seed() -> None:
    """Seeds differ by far more than the cells do; each seed shows the same difference."""
    found = summarise(TOY, grid([0.3, 0.6, 0.9], [0.2, 0.51, 0.79]))
    (compared,) = found["comparisons"]
    assert compared["seeds"] == [0, 1, 2] and compared["columns"]["3"]["mean"] == pytest.approx(0.1)
    assert compared["columns"]["3"]["shows"] == "higher" and not found["smoke_test"] and found["unfinished"] == []
    assert [row["columns"]["3"]["by_seed"] for row in found["rows"]] == [[0.3, 0.6, 0.9], [0.2, 0.51, 0.79]]
    assert found["cells"][0]["spent"]["steps"] == 101


def test_an_interval_that_holds_zero_shows_nothing() -> None:
    assert (shows(0.1, 0.2), shows(-0.1, 0.2), shows(0.3, 0.2), shows(-0.3, 0.2)) == (
        "no difference shown",
        "no difference shown",
        "higher",
        "lower",
    )


def test_under_three_seeds_nothing_is_claimed() -> None:
    found = summarise(TOY, grid([0.9, 0.8], [0.1, 0.2]))
    assert found["smoke_test"] and found["comparisons"] == [] and found["unfinished"] == ["fed, seed 2", "plain, seed 2"]
    text = readme(found | {"command": "fullband experiment toy"})
    assert text.startswith("# Smoke test: A toy") and "support no claim" in text and "paired by seed" not in text
    assert "| fed | exact | 2 (0, 1) | 0.850 ± 0.635 | 0.425 ± 0.318 |" in text and "Not run, and not in any table: fed, seed 2" in text


def test_a_cell_that_is_short_of_seeds_makes_it_a_smoke_test() -> None:
    assert summarise(TOY, grid([0.9, 0.8, 0.7], [0.1, 0.2]))["smoke_test"]


def test_the_report_names_n_seeds_and_intervals() -> None:
    text = readme(summarise(TOY, grid([0.3, 0.6, 0.9], [0.2, 0.51, 0.79])) | {"command": "fullband experiment toy"})
    assert "All 6 jobs: 10 minutes of processor time to train, 12 minutes to measure." in text
    assert text.startswith("# A toy\n") and "    fullband experiment toy\n" in text and "Not run" not in text
    assert "| fed, exact | plain, without feedback | 3 (0, 1, 2) | 3 | +0.100 ± 0.025 | higher |" in text
    assert "| plain | without feedback | 3 (0, 1, 2) | 0.500 ± 0.733 |" in text and "Hardware: CPU on Linux" in text


def test_a_comparison_of_an_evaluation_that_there_is_not_is_refused() -> None:
    found = [result("fed", seed, {"fused-1": 0.1}) for seed in range(3)] + grid([], [0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="no evaluation 'exact' \\(there are fused-1\\)"):
        summarise(TOY, found)


def test_every_reading_has_a_look_of_its_own() -> None:
    readings = ["standard", *(f"fused-{passes}" for passes in (0, 1, 2, 4, 8, 16, 32, 95)), "exact", "exact, zeroed", "exact, shuffled"]
    looks = [look(reading) for reading in readings]
    assert len(set(looks)) == len(looks)
    prefills = [look(prefill, "probe") for prefill in ("standard", "1", "2", "4", "full")]
    assert len(set(prefills)) == 5 and prefills[-1][0] == look("exact")[0]


def test_seconds_are_of_runs_in_one_sitting() -> None:
    found = grid([0.3, 0.6, 0.9], [0.2, 0.51, 0.79])
    found[0]["training"] |= {"resumed": True, "seconds": 1}
    spent = summarise(TOY, found)["cells"][0]["spent"]
    assert (spent["seconds"], spent["steps"]) == (101.5, 101)
    for result in found:
        result["training"] |= {"resumed": True}
    assert summarise(TOY, found)["cells"][0]["spent"]["seconds"] == pytest.approx((1 + 101 + 102) / 3)


def test_probes_are_reported_by_prefill(tmp_path: Path) -> None:
    probes = parse(Experiment, GRID | {"cells": [{"name": "fed"}], "comparisons": [], "measure": {"kind": "probe"}}, "toy")
    columns = {f"setting {n}": 0.5 for n in range(8)}
    found = summarise(probes, [result("fed", 0, {}) | {"values": {name: columns for name in ("standard", "1", "full")}}])
    text = readme(found | {"command": "fullband experiment toy"})
    assert "| fed | standard prefill | 1 (0) |" in text and "| fed | recurrent, 1 step |" in text and "| fed | full recurrence |" in text
    paths = [tmp_path / "summary.svg", tmp_path / "summary.png"]
    plot_experiment(found, paths)
    drawn = paths[0].read_text(encoding="utf-8")
    assert all(words in drawn for words in ("setting 7", "standard prefill", "recurrent, 1 step", "full recurrence"))
    height, width, _ = imread(paths[1]).shape
    assert width < 5 * height  # two lines of four


@pytest.mark.parametrize(("name", "chance"), [("s3", 1 / 6), ("probes", 0.5), ("fed-back-text", None)])
def test_chance_is_that_of_what_is_measured(name: str, chance: float | None) -> None:
    experiment = load_experiment(find_experiment(name))
    assert chance_of(experiment, jobs_of(experiment)) == chance


@pytest.mark.parametrize("chance", [None, 0.25])
def test_pictures_of_accuracies_have_a_line_at_chance(chance: float | None, tmp_path: Path) -> None:
    found = summarise(TOY, grid([0.3, 0.6, 0.9], [0.2, 0.51, 0.79])) | {"chance": chance}
    plot_experiment(found, [tmp_path / "summary.svg"])
    assert ("<!-- chance -->" in (tmp_path / "summary.svg").read_text(encoding="utf-8")) is (chance is not None)
