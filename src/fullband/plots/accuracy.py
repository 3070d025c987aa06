"""Accuracy by position, one line for each evaluation: the standard model, feedback passes, exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullband.plots.chart import Axis, Chart, Line, Mark
from fullband.plots.picture import draw_chart
from fullband.plots.style import figure, series_label


def accuracy_chart(result: Mapping[str, Any]) -> Chart:
    """Of the quickstart's result (`result.json`)."""
    by_position = result["accuracy_by_position"]
    lines = [Line(name, series_label(name), range(1, 1 + len(own)), own) for name, own in by_position.items()]
    last = max(line.x[-1] for line in lines)
    x = Axis("position, counted from 1", 1, last, [1, *range(8, int(last) + 1, 8)], prefix="position ")
    y = Axis("share of correct answers", 0, 1.08, (0, 0.2, 0.4, 0.6, 0.8, 1), digits=2)
    marks = [Mark("training length", x=result["task"]["length"]), Mark("chance", y=result["chance"])]
    return Chart("Accuracy by position", lines, x, y, marks)


def plot_accuracy(result: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Draw the quickstart's result (`result.json`) into `paths`."""
    task = result["task"]
    with figure(paths) as (_, axes):
        draw_chart(axes, accuracy_chart(result))
        axes.set_title(f"Running products in {task['group']}" if task["task"] == "group-word" else "Running arithmetic")
        axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
