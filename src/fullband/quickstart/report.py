"""report.html: one page that explains what was done and what came out, self-contained. The page itself is report_template.html."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from fullband.plots.accuracy import accuracy_chart
from fullband.plots.curves import Curve, Steps, loss_chart, steps_by_label, steps_html
from fullband.plots.page import fill
from fullband.plots.style import series_label
from fullband.quickstart import prose
from fullband.quickstart.recipes import POSITIONS

TEMPLATE = Path(__file__).with_name("report_template.html")
HEADLINE_POSITION = 32
HEADLINE_READINGS = ("exact", "fused-16", "fused-1", "standard")


def report(result: Mapping[str, Any], curves: Mapping[str, Sequence[Curve]], steps: Mapping[str, Steps]) -> str:
    """The page for a result (`result.json`), and the training curves and logged steps of its two models."""
    task, recipe = result["task"], result["recipe"]
    return fill(
        TEMPLATE,
        headline=prose.headline(result, HEADLINE_POSITION),
        numbers="".join(headline_number(result, name) for name in HEADLINE_READINGS),
        headline_position=HEADLINE_POSITION,
        length=task["length"],
        seed=result["seed"],
        rows=f"{result['rows']:,}",
        layers=result["trunk"]["layers"],
        task_name=prose.task_name(task),
        task_text=prose.task_text(task),
        example=example_rows(result["example"], task["length"]),
        why=prose.why(task, result["trunk"]),
        accuracy_chart=accuracy_chart(result).html(),
        accuracy_table=accuracy_table(result),
        chance=f"{result['chance']:.3f}".rstrip("0"),
        curves_chart=loss_chart(curves, result["milestones"]).html(),
        steps_charts=steps_html(steps_by_label(steps)),
        chance_loss=f"{math.log(1 / result['chance']):.2f}",
        milestones=prose.milestones(result["milestones"]),
        compute_text=prose.compute(result),
        compute_table=compute_table(result["training"]),
        mixin=prose.mixin(recipe["feedback"]["prefix"]),
        scope=prose.scope(),
        command=escape(command(result)),
        fullband_folder=escape(recipe["output"]),
        recipe=escape(yaml.safe_dump({key: recipe[key] for key in ("model", "data", "feedback", "optim", "train")}, sort_keys=False)),
        versions=escape(versions(result)),
    )


def headline_number(result: Mapping[str, Any], name: str) -> str:
    accuracy = result["accuracy"][name][str(HEADLINE_POSITION)]
    return f'<li class="{name}"><b>{accuracy:.0%}</b><span>{escape(series_label(name))}</span></li>'.replace("%", " %")


def example_rows(example: Mapping[str, Any], length: int) -> str:
    """Position, token, right answer and both models' answers, one column a position."""
    positions = range(1, len(example["right"]) + 1)

    def row(heading: str, cells: Sequence[Any], answers: bool = False) -> str:
        parts = []
        for position, cell, right in zip(positions, cells, example["right"], strict=True):
            classes = ["last"] * (position == length) + ["wrong"] * (answers and cell != right)
            parts.append(f'<td class="{" ".join(classes)}">{escape(str(cell))}</td>' if classes else f"<td>{escape(str(cell))}</td>")
        return f"<tr><th>{heading}</th>{''.join(parts)}</tr>"

    return (
        f"<thead>{row('position', list(positions)).replace('<td', '<th').replace('</td', '</th')}</thead><tbody>"
        + row("token", example["tokens"])
        + row("right answer", example["right"])
        + row(series_label("standard"), example["standard"], answers=True)
        + row(series_label("exact"), example["exact"], answers=True)
        + "</tbody>"
    )


def accuracy_table(result: Mapping[str, Any]) -> str:
    chance, body = result["chance"], []
    for name, accuracies in result["accuracy"].items():
        cells = []
        for position, accuracy in accuracies.items():
            stderr = result["stderr"][name][position]
            kind = "high" if accuracy >= 0.8 else "low" if accuracy < chance + 3 * stderr + 0.02 else ""
            cells.append(f'<td class="{kind}">{accuracy:.2f} <small>± {stderr:.3f}</small></td>')
        body.append(f"<tr><th>{escape(series_label(name))}</th>{''.join(cells)}</tr>")
    heads = "".join(f"<th>{position}</th>" for position in POSITIONS)
    return f"<thead><tr><th>accuracy at position</th>{heads}</tr></thead><tbody>{''.join(body)}</tbody>"


def compute_table(training: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        ("steps", "steps", "{:,}"),
        ("tokens", "tokens", "{:,}"),
        ("token-equivalent compute", "token_equivalent", "{:,}"),
        ("positions executed", "executed_positions", "{:,}"),
        ("FLOPs executed, billions", "executed_flops", "{:,.1f}"),
        ("parameters", "parameters", "{:,}"),
        ("seconds", "seconds", "{:.0f}"),
    ]
    heads = "".join(f"<th>{escape(series_label(name))}</th>" for name in training)
    in_billions = [{**run, "executed_flops": run["executed_flops"] / 1e9} for run in training.values()]
    body = [f"<tr><th>{label}</th>{''.join(f'<td>{form.format(run[key])}</td>' for run in in_billions)}</tr>" for label, key, form in rows]
    return f"<thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(body)}</tbody>"


def command(result: Mapping[str, Any]) -> str:
    changes = [word for override in result["overrides"] for word in ("--set", override)]
    return shlex.join(["fullband", "quickstart", "--seed", str(result["seed"]), *changes])


def versions(result: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    hardware = result["hardware"]
    return f"{packages}; {hardware['system']} on {hardware['machine']}, {hardware['cores']} cores; {result['seconds']:.0f} seconds in all."
