"""A diagnosis as one page that opens offline. The page itself is diagnosis_page.html."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from fullband.plots.chart import SCRIPT, STYLE, Axis, Line, Mark, line_chart, log_axis, near_axis, nice_ticks
from fullband.plots.numbers import drawn, finite
from fullband.plots.page import stylesheet
from fullband.plots.reachability import SHADES, WORDS, influence_text, shade, shown_layer
from fullband.plots.settling import MANY, Series, change_series, loss_series, pass_ticks
from fullband.plots.stability import RESPONSE_KEYS, responses, rollout_lines, rollout_name

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


def page(diagnosis: Mapping[str, Any]) -> str:
    """The page of a diagnosis: `Diagnosis.to_json`, with "model" and "data" in words beside it."""
    trace, worse = diagnosis["trace"], diagnosis.get("worse")
    why = [f"But {worse}."] if worse else []
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        stylesheet=stylesheet(),
        chart_style=STYLE.read_text(encoding="utf-8"),
        chart_script=SCRIPT.read_text(encoding="utf-8"),
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
        loss_chart=loss_chart(trace),
        change_chart=change_chart(trace, "relative"),
        absolute_chart=change_chart(trace, "absolute"),
        arrival_chart=arrival_chart(trace),
        passes_table=passes_table(trace),
        needed=needed_text(trace),
        late_ratio=number(trace["late_ratio"]),
        rollouts=rollouts(diagnosis),
        response=response(diagnosis),
        reach=reach(diagnosis),
        settings=escape(json.dumps(diagnosis["settings"], indent=2)),
    )


def headline(diagnosis: Mapping[str, Any]) -> str:
    """The verdict in words, and whether repeated passes made the loss worse."""
    words = HEADLINES[diagnosis["verdict"]]
    return f"{words}, to a worse loss" if diagnosis.get("worse") else words


def number(value: float | None, digits: int = 3) -> str:
    """Three digits; a dash for what was not measured."""
    return "–" if value is None or value != value else f"{value:.{digits}g}"


def passes_axis(trace: Mapping[str, Any], first: int) -> Axis:
    last = max(trace["records"][-1]["k"], first + 1)
    return Axis("pass k (1 = plain)", first, last, pass_ticks(first, last), prefix="pass ", log=last > MANY)


def lines_of(series: Sequence[Series]) -> list[Line]:
    return [Line(line.key, line.label, line.passes, line.values) for line in series]


def horizon_mark(trace: Mapping[str, Any]) -> list[Mark]:
    return [Mark("half the row", x=trace["horizon"])] if trace["records"][-1]["k"] > trace["horizon"] else []


def loss_chart(trace: Mapping[str, Any]) -> str:
    lines = lines_of(loss_series(trace))
    values = [value for line in lines for value in line.y]
    y = near_axis("loss, nats a target", values)
    return line_chart("Loss by pass", lines, horizon_mark(trace), passes_axis(trace, 1), y)


def change_chart(trace: Mapping[str, Any], kind: str) -> str:
    lines = lines_of(change_series(trace, kind))
    if not lines:
        return "<p>No state changed at all.</p>"
    y = log_axis(f"{kind} state change", [value for line in lines for value in line.y])
    return line_chart(f"{kind} state change by pass".capitalize(), lines, horizon_mark(trace), passes_axis(trace, 2), y)


def arrival_chart(trace: Mapping[str, Any]) -> str:
    arrival, last = trace["arrival"], trace["records"][-1]["k"]
    lines = []
    for label, key, passes in (("median over rows", "fused-8", arrival["median"]), ("90th percentile", "fused-1", arrival["p90"])):
        reached = [(t, k) for t, k in zip(arrival["positions"], passes, strict=True) if k is not None]
        lines.append(Line(key, label, [t for t, _ in reached], [k for _, k in reached]))
    bound = [t for t in arrival["positions"] if t + 1 <= last]
    lines.append(Line("standard", "the latest possible, t + 1", bound, [t + 1 for t in bound]))
    furthest = max(1, trace["length"] - 1)
    x = Axis("position t", 0, furthest, nice_ticks(furthest), prefix="position ")
    y = Axis("passes", 0, 1.05 * last, nice_ticks(last))
    return line_chart("Passes until exact", [line for line in lines if line.x], [], x, y)


def cells_of(record: Mapping[str, Any]) -> list[str]:
    """A pass as the cells under HEADS: "change" is relative to the state's norm unless it says otherwise."""
    nothing = {"relative": None, "absolute": None, "p99": None}
    whole, past, front = (record[group] or nothing for group in ("change", "change_past", "change_front"))
    changes = (whole["relative"], past["relative"], past["p99"], past["absolute"], front["relative"])
    values = (record["loss"], record["loss_past"], *changes, record["gap_loss"], record["gap_state_past"], record["gap_kl_past"])
    return [str(record["k"]), *map(number, values)]


def passes_table(trace: Mapping[str, Any]) -> str:
    shown = [record for record in trace["records"] if record["k"] in LISTED or record is trace["records"][-1]]
    body = ""
    for record in shown:
        k, *cells = cells_of(record)
        body += f"<tr><th>{k}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return f"<thead><tr>{''.join(f'<th>{head}</th>' for head in HEADS)}</tr></thead><tbody>{body}</tbody>"


def needed_text(trace: Mapping[str, Any]) -> str:
    """From which pass on 99% of the states past the wavefront move less than each tolerance."""
    return ", ".join(f"{float(tolerance):g}: {k or 'not reached'}" for tolerance, k in trace["passes_needed"].items())


def rollouts(diagnosis: Mapping[str, Any]) -> str:
    found = diagnosis["rollouts"]
    if not found:
        return "<p>None were asked for.</p>"
    lines = [Line(key, label, places, values) for label, key, places, values in rollout_lines(diagnosis)]
    high = max(finite(value for line in lines for value in line.y), default=1.0) * 1.1
    last = found[0]["tokens"]
    x = Axis("generated token", 0, last, nice_ticks(last), prefix="token ")
    chart = line_chart("Scale over a rollout", lines, [], x, Axis("root mean square", 0, high, nice_ticks(high), digits=3))
    return chart + "".join(f"<p>{escape(rollout_text(rollout))}</p>" for rollout in found)


def rollout_text(rollout: Mapping[str, Any]) -> str:
    """One rollout in a sentence or two."""
    name, loops = rollout_name(rollout), rollout["loops"]
    shortest = f", the shortest of {min(loop['period'] for loop in loops)} tokens" if loops else ""
    restarts = (
        f"The context is shorter: {rollout['restarts']} times the last half of it was read anew."
        if rollout["restarts"]
        else "The context held all of it."
    )
    return (
        f"{name.capitalize()} ({rollout['mode']}, {rollout['rows']} rows of {rollout['tokens']:,} tokens): states end at "
        f"{number(rollout['drift_state'])} times the scale they began with, inputs at {number(rollout['drift_input'])}; "
        f"{rollout['distinct']:.0%} of the 4-grams are different; {len(loops)} of {rollout['rows']} rows end in a loop{shortest}. "
        f"{restarts}"
    )


def response(diagnosis: Mapping[str, Any]) -> str:
    found = diagnosis["perturbation"]
    if found is None:
        return "<p>The rows are too short to follow one.</p>"
    lines, words, furthest = [], [], 0
    for label, one in responses(found).items():
        furthest = max(furthest, len(one["distance"]) - 1)
        kept = [(n, value) for n, value in enumerate(drawn(one["distance"])) if value > 0]
        lines.append(Line(RESPONSE_KEYS[label], label, [n for n, _ in kept], [value for _, value in kept]))
        words.append(f"{label} x {number(one['growth'])} in each")
    x = Axis("positions or passes after the nudge", 0, furthest, nice_ticks(furthest), prefix="after ")
    chart = line_chart("Response", lines, [], x, log_axis("relative distance", [value for line in lines for value in line.y]))
    text = (
        f"Along positions, the state of position {found['position']} was nudged and the text read on exactly; "
        "over passes, all states of the plain pass."
    )
    return f"{chart}<figcaption>σ = {found['sigma']:g} of the state's norm: {'; '.join(words)}. {text}</figcaption>"


def reach_text(diagnosis: Mapping[str, Any]) -> str:
    """Whether the grids are as the paper says."""
    broken = sum(grid["unexpected"] for grid in diagnosis["reach"])
    grid = diagnosis["reach"][0]
    carried, top = grid.get("carried", grid["layers"][-1]), grid["layers"][-1]
    rule = "Eqs. 2 and 7 say" + ("" if carried == top else f" where layer {carried} is fed back instead of the top one")
    return f"{broken} states are not as {rule} ({_why_hidden(diagnosis['reach'])})" if broken else f"as {rule}"


def _why_hidden(grids: Sequence[Mapping[str, Any]]) -> str:
    """Why states are not as the equations say, told by which they are: the plain pass shows what attention hides, without feedback."""

    def pasts(grid: Mapping[str, Any]) -> Iterator[tuple[bool, bool]]:  # (whether the source lies below the target, whether it is reached)
        for target, rows in zip(grid["layers"], grid["influence"], strict=True):
            for row in rows[:-1]:
                yield from ((source < target, value > 0) for source, value in zip(grid["layers"], row, strict=True))

    plain = [seen for grid in grids if grid["mode"] == "standard" for seen in pasts(grid)]
    soft = [seen for grid in grids if grid["mode"] != "standard" for seen in pasts(grid)]
    why = []
    if any(reached and not below for below, reached in plain):
        why.append("without feedback, too, states are reached that layers of one pass should not reach")
    if any(below and not reached for below, reached in plain):
        why.append("attention windows shorter than the row hide states, without feedback as well")
    if soft and not any(reached and not below for below, reached in soft):
        why.append("nothing comes through the fusion, which is still closed")
    return "; ".join(why) or "without feedback all is as expected and the fusion is open: some gradients are cut or too small"


def reach(diagnosis: Mapping[str, Any]) -> str:
    if not diagnosis["reach"]:
        return f"<p>Not measured: {escape(diagnosis['reach_missing'])}.</p>"
    legend = [("exact", "the state asked about"), *zip(reversed(SHADES), reversed(WORDS), strict=True), ("white", "out of reach")]
    keys = "".join(f'<li><span class="dot {key}"></span>{words}</li>' for key, words in legend)
    grids = "".join(_grid(grid) for grid in diagnosis["reach"])
    caption = (
        f"Measured by gradients ({reach_text(diagnosis)}): how far a change of each state moves the one asked about, relative to both. In "
        "Soft the dotted line ends the plain prompt, whose states are fed back only at its end. Point at a state for its value."
    )
    return f'<ul class="legend">{keys}</ul><div class="grids">{grids}</div><figcaption>{caption}</figcaption>'


def _grid(grid: Mapping[str, Any]) -> str:
    layers, target = grid["layers"], shown_layer(grid["layers"])
    influence = grid["influence"][target]
    left, top, step_x, step_y = 62, 14, 46, 36
    width, height = left + step_x * len(influence), top + step_y * len(layers) + 24
    parts = []
    for index, layer in enumerate(layers):
        name = "input" if layer == 0 else f"layer {layer}"
        parts.append(f'<text x="{left - 8}" y="{top + step_y * (len(layers) - 1 - index) + 20}" text-anchor="end">{name}</text>')
    last = len(influence) - 1
    for position, column in enumerate(influence):
        x = left + step_x * position + 20
        name = "t" if position == last else f"t − {last - position}"
        parts.append(f'<text x="{x}" y="{height - 6}" text-anchor="middle">{name}</text>')
        for index, value in enumerate(column):
            if position == last and index > target:
                continue
            asked = position == last and index == target
            key = "exact" if asked else shade(value) or "white"
            said = "the state asked about" if asked else influence_text(value)
            y = top + step_y * (len(layers) - 1 - index) + 16
            parts.append(f'<circle class="{key}" cx="{x}" cy="{y}" r="10"><title>{name}, {layers[index]}: {said}</title></circle>')
    if grid["mode"] == "soft":
        x = left + step_x * grid["prompt"] - 3
        parts.append(f'<line class="mark dotted" x1="{x}" x2="{x}" y1="4" y2="{height - 22}"/>')
    title = {"standard": "Standard", "soft": "Soft"}[grid["mode"]]
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}">{"".join(parts)}</svg>'
    return f"<figure><b>{title}</b>: what moves layer {layers[target]} at t{svg}</figure>"
