"""The tables of a report, as rows of text: the terminal, Markdown and the page show the same ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAPER = Path(__file__).with_name("paper.json")
MODES = {"standard": "Standard", "soft": "Soft", "fused": "Fused"}


@dataclass(frozen=True)
class ReportTable:
    """`words` columns at the left are words, the others numbers; notes stand below."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    words: int = 1


def tables_of(results: Mapping[str, Any]) -> list[ReportTable]:
    """All tables of one evaluation."""
    made = []
    if results["tasks"]:
        made += [accuracy_table(results), differences_table(results)]
    if results["generative"]:
        made += [modes_table(results), pairs_table(results), temperature_table(results), lengths_table(results)]
    made += paper_tables(results)
    return [table for table in made if table.rows]


def accuracy_table(results: Mapping[str, Any]) -> ReportTable:
    """Accuracy by feedback passes, a line for each task and their mean."""
    tasks, names = results["tasks"], _readings(results)
    baseline = any("baseline" in task for task in tasks.values())
    rows = []
    for name, task in tasks.items():
        cells = [score(task["readings"].get(reading)) for reading in names]
        rows.append(
            [name, task["metric"], str(task["shots"]), str(task["documents"]), *cells, *([score(task.get("baseline"))] if baseline else [])]
        )
    mean = results["mean"]
    if mean:
        cells = [score(mean["readings"].get(reading)) for reading in names]
        rows.append(["mean of tasks", "", "", "", *cells, *([score(mean.get("baseline"))] if baseline else [])])
    columns = ["task", "metric", "examples", "documents", *(reading_label(name) for name in names), *(["baseline"] if baseline else [])]
    notes = [
        "Percent ± standard error over documents; the mean's is the tasks' errors added in quadrature, divided by their number (Fig. 4)."
    ]
    notes += [f"{name}: {task['note']}." for name, task in tasks.items() if task["note"]]
    return ReportTable(smoke(results, "Accuracy by feedback passes"), columns, rows, notes, 2)


def differences_table(results: Mapping[str, Any]) -> ReportTable:
    """Is the difference real? Paired on the same documents."""
    rows = []
    for name, task in results["tasks"].items():
        rows += [[name, *_difference(one)] for one in task["differences"]]
    for one in (results["mean"] or {}).get("differences", []):
        rows.append(["mean of tasks", *_difference(one)])
    notes = [
        "Paired on the same documents. McNemar: documents that only the first, or only the second, answered correctly; exact, two-sided."
    ]
    return ReportTable(
        smoke(results, "Differences"), ["task", "second − first", "difference", "only first", "only second", "p"], rows, notes, 2
    )


def modes_table(results: Mapping[str, Any]) -> ReportTable:
    """Fig. 5 and Table 1: a line for each benchmark, a column for each mode."""
    modes = list(next(iter(results["generative"].values()))["modes"])
    baseline = any("baseline" in found for found in results["generative"].values())
    rows = []
    for found in results["generative"].values():
        cells = [f"{score(found['modes'][mode]['score'])}{_interval(found['modes'][mode])}" for mode in modes]
        own = [score(found["baseline"]["score"]) if "baseline" in found else "-"] if baseline else []
        rows.append([found["label"], _measure(found), str(found["problems"]), *cells, *own])
    notes = [
        "Percent ± standard error over problems; in brackets Wilson's 95% interval, where each problem has one answer. "
        "Where a temperature was chosen on these very problems the score flatters: see the next tables.",
        *(f"{found['label']}: {text}" for found in results["generative"].values() if (text := _losses(found))),
    ]
    columns = ["benchmark", "measure", "problems", *(MODES[mode] for mode in modes), *(["baseline"] if baseline else [])]
    return ReportTable(smoke(results, "Free-form generation by mode"), columns, rows, notes, 2)


def pairs_table(results: Mapping[str, Any]) -> ReportTable:
    rows = []
    for found in results["generative"].values():
        rows += [[found["label"], *_difference(one)] for one in found["pairs"]]
    notes = ["Each mode at its own temperature. McNemar counts problems for which one of the first k samples is correct."]
    return ReportTable(
        smoke(results, "Modes against each other"),
        ["benchmark", "second − first", "difference", "only first", "only second", "p"],
        rows,
        notes,
        2,
    )


def temperature_table(results: Mapping[str, Any]) -> ReportTable:
    """Fixed temperatures, the best, and the split-half choice."""
    sampled = {name: found for name, found in results["generative"].items() if found["n"] > 1}
    temperatures = list(dict.fromkeys(t for found in sampled.values() for mode in found["modes"].values() for t in mode["fixed"]))
    rows = []
    for found in sampled.values():
        for mode, own in found["modes"].items():
            half = own["split_half"]
            fixed = [score(own["fixed"].get(temperature)) for temperature in temperatures]
            rows.append([found["label"], MODES[mode], *fixed, f"{score(own['score'])} (at {own['temperature']:g})", score(half)])
    notes = [
        "best: chosen on the problems it reports, as the paper does. split-half: chosen on one half, reported on the other, both ways."
    ]
    columns = ["benchmark", "mode", *(f"T = {temperature}" for temperature in temperatures), "best", "split-half"]
    return ReportTable(smoke(results, "Temperatures"), columns, rows, notes, 2)


def lengths_table(results: Mapping[str, Any]) -> ReportTable:
    """Fig. 6."""
    rows = []
    for found in results["generative"].values():
        for mode, own in found["modes"].items():
            lengths = own["lengths"]
            quartiles = [_whole(lengths[part]) for part in ("lower_quartile", "median", "upper_quartile")]
            rows.append(
                [found["label"], MODES[mode], *quartiles, str(lengths["finished"]), str(lengths["truncated"]), str(own["undecided"])]
            )
    columns = ["benchmark", "mode", "lower quartile", "median tokens", "upper quartile", "ended", "cut at the limit", "undecided"]
    notes = ["Tokens of complete answers; those cut off at the limit would have been longer. Counted over samples, not problems."]
    return ReportTable(smoke(results, "Length of answers"), columns, rows, notes, 2)


def paper_tables(results: Mapping[str, Any]) -> list[ReportTable]:
    """Tables 1 and 2 beside the same measurements here."""
    paper = json.loads(PAPER.read_text(encoding="utf-8"))
    made = []
    second = paper["table_2"]
    if results["plan"]["suite"] == "paper-0shot":
        rows = [
            [name, *(f"{value:.2f}" for value in values), f"{sum(values) / len(values):.2f}"] for name, values in second["rows"].items()
        ]
        for reading in _readings(results):
            cells = [score(results["tasks"][task]["readings"][reading]) for task in second["tasks"]]
            rows.append([f"here: {reading_label(reading)}", *cells, score(results["mean"]["readings"][reading])])
        if "baseline" in results["mean"]:
            cells = [score(results["tasks"][task]["baseline"]) for task in second["tasks"]]
            rows.append(["here: baseline", *cells, score(results["mean"]["baseline"])])
        made.append(
            ReportTable(
                smoke(results, "Table 2 of the paper, and here"), ["model", *second["tasks"], "mean"], rows, [second["about"] + "."]
            )
        )
    first = paper["table_1"]
    if results["generative"] and results["plan"]["prompts"] == "chat":
        names = [name for name in first["rows"] if name in results["generative"]]
        rows = [[column, *(f"{first['rows'][name][place]:.2f}" for name in names)] for place, column in enumerate(first["columns"])]
        for mode in results["plan"]["modes"]:
            rows.append([f"here: {MODES[mode]}", *(score(results["generative"][name]["modes"][mode]["score"]) for name in names)])
        if results["baseline"]:
            rows.append(["here: baseline", *(score(results["generative"][name]["baseline"]["score"]) for name in names)])
        labels = [results["generative"][name]["label"] for name in names]
        made.append(ReportTable(smoke(results, "Table 1 of the paper, and here"), ["model", *labels], rows, [first["about"] + "."]))
    return made


def smoke(results: Mapping[str, Any], title: str) -> str:
    return f"Smoke test: {title}" if results["smoke_test"] else title


def score(found: Mapping[str, Any] | None) -> str:
    """Percent with its error: 45.1 ± 1.2."""
    if found is None or found["value"] is None:
        return "-"
    error = found["error"]
    return f"{100 * found['value']:.1f}" + ("" if error is None or math.isnan(error) else f" ± {100 * error:.1f}")


def reading_label(name: str) -> str:
    return {"0": "0 passes", "1": "1 pass", "soft": "Soft"}.get(name, f"{name} passes" if name.isdecimal() else name)


def _readings(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(reading for task in results["tasks"].values() for reading in task["readings"]))


def _difference(one: Mapping[str, Any]) -> list[str]:
    difference, test = one["difference"], one.get("mcnemar")
    names = [MODES.get(name) or reading_label(name) for name in (one["second"], one["first"])]
    shown = score(difference)
    signed = shown if shown.startswith("-") else f"+{shown}"
    return [
        " − ".join(names),
        signed,
        *([str(test["only_first"]), str(test["only_second"]), f"{test['p_value']:.3g}"] if test else ["-"] * 3),
    ]


def _measure(found: Mapping[str, Any]) -> str:
    return f"Pass@{found['k']}" + (f" of {found['n']}" if found["n"] > 1 else ", greedy")


def _interval(mode: Mapping[str, Any]) -> str:
    return "" if mode["wilson"] is None else " ({:.1f} to {:.1f})".format(*(100 * bound for bound in mode["wilson"]))


def _losses(found: Mapping[str, Any]) -> str:
    cut = max(mode["cut_prompts"] for mode in found["modes"].values())
    return f"{cut} prompts did not fit the context with {found['new_tokens']} new tokens and lost their beginning." if cut else ""


def _whole(number: float | None) -> str:
    return "-" if number is None or math.isnan(number) else f"{number:.0f}"
