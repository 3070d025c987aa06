"""Pictures are drawn from dicts and run folders, and matplotlib waits until one is."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fullband.plots.accuracy import plot_accuracy
from fullband.plots.chart import Axis, Chart, Line, Mark, log_axis, near_axis, nice_ticks
from fullband.plots.curves import Curve, Steps, compute_at, curves_html, plot_curves, read_curves, read_steps
from fullband.plots.page import STYLESHEET
from fullband.plots.style import DARK, DASHES, LIGHT, PASS_KEYS, RUN_DARK, RUN_LIGHT, figure, series_label


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
    chart = Chart("c", [Line("exact", "a", range(6), [1.0, 2.0, math.nan, None, math.inf, 3.0])], axis, axis).html()
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
    plot_curves({"standard": curves[:1], "fullband": curves}, [tmp_path / "curves.png"], {"switch_on_step": 2, "crossover_step": None}, {})
    for name in ("accuracy.png", "curves.png"):
        height, width, _ = imread(tmp_path / name).shape
        assert width > height > 300
    assert "<svg" in (tmp_path / "accuracy.svg").read_text(encoding="utf-8")


def test_learning_curves_begin_at_the_data_and_have_norm_and_rates_below(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves, milestones = {"fullband": read_curves(run_folder)}, {"switch_on_step": 2, "crossover_step": None}
    steps = {"fullband": Steps([10, 20, 40, 70], [2.0, 1.0, math.nan, 4.0], {"matrix_lr": [0.1, 0.2, 0.2, 0.1]})}
    kept = []

    @contextmanager
    def keep(*args: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
        with figure([], **options) as made:
            yield made
        kept.extend(made[1].flat)

    monkeypatch.setattr("fullband.plots.curves.figure", keep)
    plot_curves(curves, [], milestones, steps)
    loss, norm, rate = kept
    assert [axes.get_xlim() for axes in kept] == [(10e-6, 70e-6)] * 3
    drawn = [value for curve in curves["fullband"] for value in curve.smooth]
    assert 0 < min(drawn) - 0.5 < loss.get_ylim()[0] < min(drawn) and loss.get_ylim()[1] > max(drawn)
    assert list(norm.lines[-1].get_ydata())[:2] == [2.0, 1.0] and list(rate.lines[-1].get_ydata()) == [0.1, 0.2, 0.2, 0.1]
    page = curves_html(curves, milestones, steps)
    data = [json.loads(html.unescape(found)) for found in re.findall(r"data-chart='([^']*)'", page)][::2]
    assert len(data) == 3 and {chart["x"]["low"] for chart in data} == {10e-6}
    assert data[1]["lines"][0]["y"] == [2.0, 1.0, 4.0]


def test_steps_that_say_neither_have_no_charts(run_folder: Path) -> None:
    assert read_steps(run_folder).rates == {}
    assert curves_html({"fullband": read_curves(run_folder)}, {}, {"fullband": read_steps(run_folder)}).count("<figure") == 1


@pytest.mark.parametrize(("palette", "paper"), [(LIGHT | RUN_LIGHT, "#ffffff"), (DARK | RUN_DARK, "#14171b")], ids=["light", "dark"])
def test_every_colour_stands_out_from_its_paper(palette: dict[str, str], paper: str) -> None:
    """By 3 : 1 at least, which WCAG 2 asks of graphics."""
    assert f"--paper: {'#fff' if paper == '#ffffff' else paper};" in STYLESHEET.read_text(encoding="utf-8")
    pale = {key: round(contrast(colour, paper), 2) for key, colour in palette.items() if contrast(colour, paper) < 3}
    assert pale == {}


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio of two sRGB colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_marks_label_stays_within_the_chart() -> None:
    """Where there is room on neither side of the mark, it ends at the right edge."""
    x = Axis("x", 0, 10, (0, 10))
    label = "feedback on, shock +2.73 nats"
    for at in (0, 4, 5, 6, 10):
        chart = Chart("c", [Line("exact", "a", [0, 10], [0.0, 10.0])], x, x, [Mark(label, x=at)]).html()
        for width, (start, anchor) in zip((760, 360), re.findall(r'class="note" x="([^"]*)"[^>]*text-anchor="(\w*)"', chart), strict=True):
            low, high = (
                (float(start), float(start) + 6.2 * len(label)) if anchor == "start" else (float(start) - 6.2 * len(label), float(start))
            )
            assert 0 <= low < high <= width, (at, anchor)


def test_every_evaluation_has_one_style() -> None:
    assert list(LIGHT) == list(DARK) and list(RUN_LIGHT) == list(RUN_DARK)
    assert set(PASS_KEYS.values()) | set(DASHES) <= set(LIGHT)
    assert series_label("fused-1") == "full-band, 1 feedback pass"
    assert series_label("fused-0") == "full-band, without feedback" and series_label("fused-16") == "full-band, 16 feedback passes"


def test_matplotlib_is_imported_only_to_draw() -> None:
    check = "import sys, fullband, fullband.plots.style, fullband.plots.accuracy; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
