"""Fig. 7 is drawn from a results file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fullband.plots.probe import _lowest, plot_probe

PREFILLS = ["standard", "1", "2", "4", "full"]


def setting(task: str, registers: int | None = None, writes_each: int | None = None) -> dict[str, Any]:
    def depth(number: int, prefill: int) -> dict[str, Any]:
        moved = None if task == "memory" and prefill == 0 else min(1.0, 0.3 * number + 0.1 * prefill)
        return {"depth": number, "accuracy": min(1.0, 0.5 + 0.1 * number + 0.08 * prefill), "stderr": 0.01, "moved": moved}

    prefills = [{"prefill": name, "depths": [depth(d, k) for d in range(5)]} for k, name in enumerate(PREFILLS)]
    return {"task": task, "registers": registers, "writes_each": writes_each, "prefills": prefills}


@pytest.fixture
def result() -> dict[str, Any]:
    shapes = [(1, 16), (2, 8), (4, 4), (8, 2), (8, 4), (8, 8)]
    return {"settings": [setting("completion"), setting("memory"), *(setting("registers", *shape) for shape in shapes)]}


def test_both_figures(result: dict[str, Any], tmp_path: Path) -> None:
    from matplotlib.image import imread

    drawn = plot_probe(result, tmp_path)
    assert [path.name for path in drawn] == ["figure-7a.png", "figure-7a.svg", "figure-7b.png", "figure-7b.svg"]
    assert sorted(tmp_path.iterdir()) == sorted(drawn)
    for path in drawn:
        if path.suffix == ".png":
            height, width, _ = imread(path).shape
            assert width > height > 600
        else:
            assert "<svg" in path.read_text(encoding="utf-8")


def test_what_was_not_probed_is_not_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    one_sweep = result["settings"][:1]
    assert [path.name for path in plot_probe({"settings": one_sweep}, tmp_path)] == ["figure-7a.png", "figure-7a.svg"]


def test_the_axis_reaches_down_to_the_lowest_accuracy(result: dict[str, Any]) -> None:
    assert _lowest(result["settings"]) == 0.42
    result["settings"][3]["prefills"][0]["depths"][1] |= {"accuracy": 0.2}
    assert _lowest(result["settings"]) == pytest.approx(0.17)


def test_a_probe_that_was_interrupted_is_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    """After its first setting with registers, before those with eight."""
    drawn = plot_probe({"settings": result["settings"][2:3]}, tmp_path)
    assert [path.name for path in drawn] == ["figure-7b.png", "figure-7b.svg"]
