"""Figs. 3 and 10: loss and state change by pass, positions past the wavefront apart from the front itself and from whole rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullband.plots.numbers import drawn
from fullband.plots.style import LIGHT, dash, figure

MANY = 48  # passes from which the axis of passes is logarithmic
LOG_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
STYLES = {"whole rows": "rows", "past the wavefront": "fused-8", "99th percentile there": "fused-1", "at the wavefront": "front"}
EXACT = "exact evaluation"


@dataclass(frozen=True)
class Series:
    """A named line over passes; `key` is its style."""

    label: str
    key: str
    passes: list[int]
    values: list[float]


def loss_series(trace: Mapping[str, Any]) -> list[Series]:
    """Loss by pass, nats: of whole rows, past the wavefront, and of exact reading at both."""
    records = trace["records"]
    series = [_series("whole rows", records, lambda r: r["loss"]), _series("past the wavefront", records, lambda r: r["loss_past"])]
    ends = [records[0]["k"], records[-1]["k"]]
    exact = trace["loss_exact_past"] if trace["loss_exact_past"] is not None else trace["loss_exact"]
    return [line for line in series if line.values] + [Series(f"{EXACT}, there", "exact", ends, drawn([exact, exact]))]


def change_series(trace: Mapping[str, Any], kind: str = "relative") -> list[Series]:
    """State change by pass, "relative" to the state's norm or "absolute". A change of 0 has no place on a logarithmic axis."""
    records = trace["records"]

    def at(group: str, what: str) -> Any:
        return lambda r: None if r[group] is None or r[group][what] == 0 else r[group][what]

    series = [
        _series("past the wavefront", records, at("change_past", kind)),
        _series("99th percentile there", records, at("change_past", "p99")) if kind == "relative" else None,
        _series("at the wavefront", records, at("change_front", kind)),
        _series("whole rows", records, at("change", kind)),
    ]
    return [line for line in series if line is not None and line.values]


def _series(label: str, records: Sequence[Mapping[str, Any]], value: Any) -> Series:
    found = zip([record["k"] for record in records], drawn(value(record) for record in records), strict=True)
    kept = [(k, y) for k, y in found if y == y]
    return Series(label, STYLES[label], [k for k, _ in kept], [y for _, y in kept])


def plot_settling(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Draw a diagnosis (`Diagnosis.to_json`) into `paths`: loss on the left, relative change on the right."""
    trace = diagnosis["trace"]
    with figure(paths, width=10.5, height=4.4, columns=2) as (drawing, ((left, right),)):
        for axes, lines in ((left, loss_series(trace)), (right, change_series(trace))):
            for line in lines:
                marker = "o" if len(line.passes) < 3 and line.label != f"{EXACT}, there" else None
                width = 1.2 if line.label == "99th percentile there" else 2.0
                style = "--" if line.label.startswith(EXACT) else dash(line.key)
                axes.plot(
                    line.passes, line.values, color=LIGHT[line.key], linestyle=style, linewidth=width, marker=marker, label=line.label
                )
            axes.set_xlabel("pass k (1 = plain)")
            last = trace["records"][-1]["k"]
            if last > MANY:
                axes.set_xscale("log")
            ticks = pass_ticks(min((line.passes[0] for line in lines), default=1), last)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            _mark_horizon(axes, trace)
        left.set(ylabel="loss, nats a target", title="Loss by pass")
        right.set_yscale("log")
        low, high = right.dataLim.intervaly
        if 0 < low <= high < math.inf:
            right.set_ylim(0.8 * 10 ** math.floor(math.log10(low)), 1.25 * 10 ** math.ceil(math.log10(high)))
        right.set(ylabel=r"mean $\|h^{(k)} - h^{(k-1)}\| \;/\; \|h^{(k)}\|$", title="State change by pass")
        handles = {label: handle for axes in (left, right) for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=9)
        drawing.suptitle(f"{diagnosis['model']}: {diagnosis['verdict']}", x=0.01, ha="left", fontsize=10.5, color="#5f5f5f")


def pass_ticks(first: int, last: int) -> list[int]:
    """Numbers of passes to write at the axis: there is no pass 0."""
    if last > MANY:
        return [tick for tick in LOG_TICKS if first <= tick <= last]
    step = next(step for step in (1, 2, 4, 8) if last <= 9 * step)
    return sorted({first, *(k for k in range(step, last + 1, step) if k - first >= step / 2)})


def _mark_horizon(axes: Any, trace: Mapping[str, Any]) -> None:
    """Beyond it the front is among the positions that were past it."""
    if trace["records"][-1]["k"] > trace["horizon"]:
        axes.axvline(trace["horizon"], color="#8a8a8a", linewidth=1, linestyle=":")
        place = axes.get_xaxis_transform()
        axes.text(
            trace["horizon"],
            1.0,
            f" k = {trace['horizon']}: half the row",
            color="#5f5f5f",
            fontsize=8.5,
            va="bottom",
            ha="center",
            transform=place,
        )
