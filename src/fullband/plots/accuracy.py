"""Accuracy by position, one line for each way of reading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullband.plots.style import LIGHT, dash, figure, reading_label


def plot_accuracy(result: dict[str, Any], paths: Sequence[Path]) -> None:
    """Draw the quickstart's result (`result.json`) into `paths`."""
    length, chance = result["task"]["length"], result["chance"]
    with figure(paths) as (_, axes):
        for name, accuracies in result["accuracy_by_position"].items():
            positions = range(1, len(accuracies) + 1)
            width = 2.6 if name == "exact" else 1.9
            axes.plot(positions, accuracies, color=LIGHT[name], linestyle=dash(name), linewidth=width, label=reading_label(name))
        axes.axvline(length, color="#8a8a8a", linewidth=1)
        axes.text(length + 0.7, 1.04, "training length", color="#5f5f5f", fontsize=9, va="center")
        axes.axhline(chance, color="#8a8a8a", linewidth=1, linestyle=":")
        axes.text(len(accuracies), chance - 0.03, "chance", color="#5f5f5f", fontsize=9, ha="right", va="top")
        axes.set(xlim=(1, len(accuracies)), ylim=(0, 1.08), xlabel="position, counted from 1", ylabel="share of right answers")
        axes.set_xticks([1, 8, 16, 24, 32, 40, 48, 56, 64])
        axes.set_title(title(result))
        axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


def title(result: dict[str, Any]) -> str:
    task = result["task"]
    return f"Running products in {task['group']}" if task["task"] == "group-word" else "Running arithmetic"
