"""Pictures are drawn from dicts and run folders, and matplotlib waits until one is."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fullband.plots.accuracy import plot_accuracy
from fullband.plots.chart import Axis, Line, line_chart, log_axis, near_axis, nice_ticks
from fullband.plots.curves import Curve, compute_at, plot_curves, read_curves
from fullband.plots.style import DARK, DASHES, LIGHT, PASS_KEYS, reading_label


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Four logged steps of 10 tokens: 1, 1, 2, 3 passes, a validation between them."""
    entries, compute = [], 0
    for step, passes in enumerate([1, 1, 2, 3]):
        compute += 10 * passes
        losses = {f"loss_pass_{k}": 2.0 - 0.1 * step + k for k in range(1, passes + 1)}
        entries.append({"step": step, "passes": passes, "objective": 1.0, "token_equivalent_compute": compute, **losses})
    entries.insert(2, {"step": 1, "validation": {"0": 1.0}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return tmp_path


def test_curves_are_read_by_pass(run_folder: Path) -> None:
    curves = read_curves(run_folder)
    assert [curve.k for curve in curves] == [1, 2, 3]
    assert [curve.step for curve in curves] == [[0, 1, 2, 3], [2, 3], [3]]
    assert curves[1].compute == [40, 70]
    assert curves[2].loss == pytest.approx([4.7])


def test_the_running_mean_starts_at_the_first_value_and_forgets_by_compute() -> None:
    dense, sparse = Curve(1, [9990, 10000], [0, 1], [4.0, 2.0]), Curve(3, [5000, 10000], [0, 1], [4.0, 2.0])
    assert dense.smooth == pytest.approx([4.0, 2 + 2 * math.exp(-0.1)])
    assert sparse.smooth == pytest.approx([4.0, 2.0])


def test_the_running_mean_leaves_out_what_is_not_finite() -> None:
    found = Curve(1, [10, 20, 30], [0, 1, 2], [math.nan, 4.0, math.nan]).smooth
    assert math.isnan(found[0]) and found[1] == 4.0 and math.isnan(found[2])


@pytest.mark.parametrize("values", [[], [math.nan, math.inf], [0.0], [1e300, math.inf], [1e-320, 1.0]])
def test_axes_are_made_of_what_is_finite(values: list[float]) -> None:
    for axis in (log_axis("y", values), near_axis("y", values)):
        assert math.isfinite(axis.low) and axis.low < axis.high < math.inf and all(map(math.isfinite, axis.ticks))
    assert nice_ticks(0) == nice_ticks(1.0)


def test_a_value_that_is_not_finite_is_a_gap_in_a_line() -> None:
    axis = Axis("x", 0, 5, (0, 5))
    chart = line_chart("c", [Line("exact", "a", range(6), [1.0, 2.0, math.nan, None, math.inf, 3.0])], [], axis, axis)
    assert chart.count('<polyline class="exact"') == 2 * 2, "two pieces at the desk, two on the phone"
    data = json.loads(html.unescape(re.findall(r"data-chart='([^']*)'", chart)[0]))
    assert data["lines"][0]["x"] == [0, 1, 5] and data["lines"][0]["y"] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("step", "compute"), [(None, None), (0, 10), (3, 70), (9, 70)])
def test_compute_at_a_step(run_folder: Path, step: int | None, compute: float | None) -> None:
    assert compute_at(read_curves(run_folder), step) == compute


def test_pictures_open(run_folder: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    result = {
        "task": {"task": "group-word", "group": "S3", "length": 16},
        "chance": 1 / 6,
        "accuracy_by_position": {name: [0.5] * 64 for name in LIGHT},
    }
    plot_accuracy(result, [tmp_path / "accuracy.png", tmp_path / "accuracy.svg"])
    curves = read_curves(run_folder)
    plot_curves({"standard": curves[:1], "fullband": curves}, [tmp_path / "curves.png"], {"switch_on_step": 2, "crossover_step": None})
    for name in ("accuracy.png", "curves.png"):
        height, width, _ = imread(tmp_path / name).shape
        assert width > height > 300
    assert "<svg" in (tmp_path / "accuracy.svg").read_text(encoding="utf-8")


def test_every_reading_has_one_style() -> None:
    assert list(LIGHT) == list(DARK)
    assert set(PASS_KEYS.values()) | set(DASHES) <= set(LIGHT)
    assert reading_label("fused-1") == "full-band, 1 pass"


def test_matplotlib_is_imported_only_to_draw() -> None:
    check = "import sys, fullband, fullband.plots.style, fullband.plots.accuracy; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
