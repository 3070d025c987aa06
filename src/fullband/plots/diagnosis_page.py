"""A diagnosis as one page that opens offline (diagnosis_page.html), and its charts, which are pictures too: loss and state change by pass
(Figs. 3 and 10), positions past the wavefront apart from the front itself and from whole sequences; when each position has arrived at
exact evaluation; scale over long rollouts; the response to a perturbation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fullband.plots.chart import Axis, Chart, Line, Mark, log_axis, near_axis, nice_ticks
from fullband.plots.numbers import finite, number
from fullband.plots.page import fill
from fullband.plots.picture import draw_chart
from fullband.plots.reachability import reach_html
from fullband.plots.style import figure

TEMPLATE = Path(__file__).with_name("diagnosis_page.html")
HEADLINES = {
    "contracting": "Contracting: the states settle",
    "wavefront-limited": "Wavefront-limited: each step waits for the one before",
    "oscillating": "Oscillating: the states do not settle",
    "diverging": "Diverging: more passes lead away",
    "not yet trained": "Not yet trained",
    "not measurable at this length": "Not measurable at this length",
}
HEADS = ("pass", "loss", "loss past", "change", "past", "p99 past", "absolute past", "front", "gap in loss", "gap in state", "KL")
LISTED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1000)  # passes of the table
MANY = 48  # passes from which the axis of passes is logarithmic
LOG_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
STYLES = {"whole sequences": "rows", "past the wavefront": "fused-8", "99th percentile there": "fused-1", "at the wavefront": "front"}
ROLLOUT_LINES = (  # (what is measured, its label, its style in a greedy rollout, in a sampled one)
    ("state", "top states", "fused-8", "fused-1"),
    ("input", "inputs of the stack", "standard", "fused-0"),
)
RESPONSES = (("along_positions", "along positions", "exact"), ("over_passes", "over passes", "fused-8"))


def page(diagnosis: Mapping[str, Any]) -> str:
    """The page of a diagnosis: `Diagnosis.to_json`, with "model" and "data" in words beside it."""
    trace, worse = diagnosis["trace"], diagnosis.get("worse")
    why = [f"But {worse}."] if worse else []
    return fill(
        TEMPLATE,
        verdict=escape(diagnosis["verdict"]),
        headline=escape(headline(diagnosis)),
        model=escape(diagnosis["model"]),
        data=escape(diagnosis["data"]),
        rows=trace["rows"],
        length=trace["length"],
        horizon=trace["horizon"],
        tolerance=f"{trace['tolerance']:g}",
        ratio_median=number(trace["ratio_median"]),
        ratio_p99=number(trace["ratio_p99"]),
        slope=number(trace["arrival"]["passes_per_position"]),
        why="".join(f"<li>{escape(sentence)}</li>" for sentence in [*why, *diagnosis["why"]]),
        loss_chart=loss_chart(trace).html(),
        change_chart=change_chart(trace).html(),
        absolute_chart=change_chart(trace, "absolute").html(),
        arrival_chart=arrival_chart(trace).html(),
        passes_table=passes_table(trace),
        needed=needed_text(trace),
        late_ratio=number(trace["late_ratio"]),
        rollouts=rollouts(diagnosis),
        response=response(diagnosis),
        reach=reach_html(diagnosis),
        settings=escape(json.dumps(diagnosis["settings"], indent=2)),
    )


def headline(diagnosis: Mapping[str, Any]) -> str:
    """The verdict in words, and whether repeated passes made the loss worse."""
    words = HEADLINES[diagnosis["verdict"]]
    return f"{words}, to a worse loss" if diagnosis.get("worse") else words


def cells_of(record: Mapping[str, Any]) -> list[str]:
    """A pass as the cells under HEADS: "change" is relative to the state's norm unless it says otherwise."""
    nothing = {"relative": None, "absolute": None, "p99": None}
    whole, past, front = (record[group] or nothing for group in ("change", "change_past", "change_front"))
    changes = (whole["relative"], past["relative"], past["p99"], past["absolute"], front["relative"])
    values = (record["loss"], record["loss_past"], *changes, record["gap_loss"], record["gap_state_past"], record["gap_kl_past"])
    return [str(record["k"]), *map(number, values)]


def passes_table(trace: Mapping[str, Any]) -> str:
    shown = [record for record in trace["records"] if record["k"] in LISTED or record is trace["records"][-1]]
    cells = [cells_of(record) for record in shown]
    body = "".join(f"<tr><th>{k}</th>{''.join(f'<td>{cell}</td>' for cell in others)}</tr>" for k, *others in cells)
    return f"<thead><tr>{''.join(f'<th>{head}</th>' for head in HEADS)}</tr></thead><tbody>{body}</tbody>"


def needed_text(trace: Mapping[str, Any]) -> str:
    """From which pass on 99% of the states past the wavefront move less than each tolerance."""
    return ", ".join(f"{float(tolerance):g}: {k or 'not reached'}" for tolerance, k in trace["passes_needed"].items())


def rollouts(diagnosis: Mapping[str, Any]) -> str:
    found = diagnosis["rollouts"]
    if not found:
        return "<p>None were asked for.</p>"
    return rollouts_chart(found).html() + "".join(f"<p>{escape(rollout_text(rollout))}</p>" for rollout in found)


def rollout_text(rollout: Mapping[str, Any]) -> str:
    """One rollout in a sentence or two."""
    name, loops = rollout_name(rollout), rollout["loops"]
    shortest = f", the shortest of {min(loop['period'] for loop in loops)} tokens" if loops else ""
    anew = f"is shorter: {rollout['restarts']} times the last half of it was prefilled anew" if rollout["restarts"] else "held all of it"
    return (
        f"{name.capitalize()} ({rollout['mode']}, {rollout['rows']} sequences of {rollout['tokens']:,} tokens): states end at "
        f"{number(rollout['drift_state'])} times the scale they began with, inputs at {number(rollout['drift_input'])}; "
        f"{rollout['distinct']:.0%} of the 4-grams are different; {len(loops)} of {rollout['rows']} sequences end in a loop{shortest}. "
        f"The context {anew}."
    )


def response(diagnosis: Mapping[str, Any]) -> str:
    found = diagnosis["perturbation"]
    if found is None:
        return "<p>The sequences are too short to follow one.</p>"
    text = (
        f"Along positions, the state of position {found['position']} was nudged and the text evaluated exactly from there on; over passes, "
        "all states of the pass without feedback."
    )
    return f"{response_chart(found).html()}<figcaption>σ = {found['sigma']:g} of the state's norm. {text}</figcaption>"


def loss_chart(trace: Mapping[str, Any]) -> Chart:
    """Loss by pass, nats: of whole sequences, past the wavefront, and of exact evaluation there."""
    records = trace["records"]
    lines = [_line("whole sequences", records, lambda r: r["loss"]), _line("past the wavefront", records, lambda r: r["loss_past"])]
    exact = trace["loss_exact_past"] if trace["loss_exact_past"] is not None else trace["loss_exact"]
    lines.append(Line("exact", "exact evaluation, there", [records[0]["k"], records[-1]["k"]], [exact, exact], dash="6 4"))
    y = near_axis("loss, nats a target", [value for line in lines for value in line.y])
    return Chart("Loss by pass", lines, _passes_axis(trace, 1), y, _horizon(trace))


def change_chart(trace: Mapping[str, Any], kind: str = "relative") -> Chart:
    """State change by pass, "relative" to the state's norm or "absolute". A change of 0 has no place on a logarithmic axis."""

    def of(group: str, what: str) -> Callable[[Mapping[str, Any]], float | None]:
        return lambda record: None if record[group] is None else record[group][what] or None

    shown = [("past the wavefront", "change_past", kind), ("at the wavefront", "change_front", kind), ("whole sequences", "change", kind)]
    if kind == "relative":
        shown.insert(1, ("99th percentile there", "change_past", "p99"))
    lines = [_line(label, trace["records"], of(group, what)) for label, group, what in shown]
    y = log_axis(f"{kind} state change", [value for line in lines for value in line.y])
    return Chart(f"{kind} state change by pass".capitalize(), lines, _passes_axis(trace, 2), y, _horizon(trace))


def arrival_chart(trace: Mapping[str, Any]) -> Chart:
    """The pass after which a position stays within the tolerance of exact evaluation."""
    arrival, last = trace["arrival"], trace["records"][-1]["k"]
    bound = [t for t in arrival["positions"] if t + 1 <= last]
    lines = [
        Line("fused-8", "median over sequences", arrival["positions"], arrival["median"]),
        Line("fused-1", "90th percentile", arrival["positions"], arrival["p90"]),
        Line("standard", "the latest possible, t + 1", bound, [t + 1 for t in bound]),
    ]
    furthest = max(1, trace["length"] - 1)
    x = Axis("position t", 0, furthest, nice_ticks(furthest), prefix="position ")
    return Chart("Passes until exact", lines, x, Axis("passes", 0, 1.05 * last, nice_ticks(last)))


def plot_settling(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Draw a diagnosis (`Diagnosis.to_json`) into `paths`: loss on the left, relative change on the right."""
    trace = diagnosis["trace"]
    with figure(paths, width=10.5, height=4.4, columns=2) as (drawing, (panels,)):
        for axes, chart in zip(panels, (loss_chart(trace), change_chart(trace)), strict=True):
            draw_chart(axes, chart)
            axes.set_title(chart.title)
        handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=9)
        drawing.suptitle(f"{diagnosis['model']}: {diagnosis['verdict']}", x=0.01, ha="left", fontsize=10.5, color="#5f5f5f")


def plot_arrival(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    trace = diagnosis["trace"]
    with figure(paths, width=8.6) as (drawing, axes):
        draw_chart(axes, arrival_chart(trace))
        axes.set_title(f"Passes until within {trace['tolerance']:g} of exact evaluation")
        drawing.legend(loc="outside lower center", ncols=3, fontsize=9)


def pass_ticks(first: int, last: int) -> list[int]:
    """Numbers of passes to write at the axis: there is no pass 0."""
    if last > MANY:
        return [tick for tick in LOG_TICKS if first <= tick <= last]
    step = next(step for step in (1, 2, 4, 8) if last <= 9 * step)
    return sorted({first, *(k for k in range(step, last + 1, step) if k - first >= step / 2)})


def _line(label: str, records: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float | None]) -> Line:
    return Line(STYLES[label], label, [record["k"] for record in records], [value(record) for record in records])


def _passes_axis(trace: Mapping[str, Any], first: int) -> Axis:
    last = max(trace["records"][-1]["k"], first + 1)
    return Axis("pass k (1 = without feedback)", first, last, pass_ticks(first, last), prefix="pass ", log=last > MANY)


def _horizon(trace: Mapping[str, Any]) -> list[Mark]:
    """Beyond it the front is among the positions that were past it."""
    shown = trace["records"][-1]["k"] > trace["horizon"]
    return [Mark(f"k = {trace['horizon']}: half the sequence", x=trace["horizon"])] if shown else []


def is_greedy(rollout: Mapping[str, Any]) -> bool:
    return bool(rollout["temperature"] == 0)


def rollout_name(rollout: Mapping[str, Any]) -> str:
    return "greedy" if is_greedy(rollout) else "sampled"


def rollouts_chart(rollouts: Sequence[Mapping[str, Any]]) -> Chart:
    """Root mean square of states and inputs over generated tokens, of every rollout."""
    lines = [
        Line(greedy if is_greedy(rollout) else sampled, f"{label}, {rollout_name(rollout)}", rollout["places"], rollout[f"{what}_rms"])
        for rollout in rollouts
        for what, label, greedy, sampled in ROLLOUT_LINES
    ]
    high = max(finite(value for line in lines for value in line.y), default=1.0) * 1.1
    last = rollouts[0]["tokens"]
    x = Axis("generated token", 0, last, nice_ticks(last), prefix="token ")
    return Chart("Scale over a rollout", lines, x, Axis("root mean square", 0, high, nice_ticks(high), digits=3))


def response_chart(perturbation: Mapping[str, Any]) -> Chart:
    """Relative distance after a nudge of size σ. A distance of 0 has no place on a logarithmic axis."""
    found = [(label, key, perturbation[what]) for what, label, key in RESPONSES if perturbation[what] is not None]
    lines = [
        Line(key, f"{label} x {number(one['growth'])} in each", range(len(one["distance"])), [value or None for value in one["distance"]])
        for label, key, one in found
    ]
    furthest = max(len(line.x) for line in lines) - 1
    x = Axis("positions or passes after the nudge", 0, furthest, nice_ticks(furthest), prefix="after ")
    y = log_axis("relative distance", [perturbation["sigma"], *(value for line in lines for value in line.y)])
    return Chart("Response to a perturbation", lines, x, y, [Mark("σ", y=perturbation["sigma"])])


def plot_rollouts(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    _plot(rollouts_chart(diagnosis["rollouts"]), paths)


def plot_response(diagnosis: Mapping[str, Any], paths: Sequence[Path]) -> None:
    _plot(response_chart(diagnosis["perturbation"]), paths)


def _plot(chart: Chart, paths: Sequence[Path]) -> None:
    with figure(paths, width=8.6) as (drawing, axes):
        draw_chart(axes, chart)
        axes.set_title(chart.title)
        drawing.legend(loc="outside lower center", ncols=4, fontsize=9)
