"""A diagnosis as one page that opens offline. The page itself is diagnosis_page.html."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from fullband.plots.numbers import number
from fullband.plots.page import fill
from fullband.plots.reachability import reach_html
from fullband.plots.settling import arrival_chart, change_chart, loss_chart, response_chart, rollout_name, rollouts_chart

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
