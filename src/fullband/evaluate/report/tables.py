"""The tables of a report, as rows of text: the terminal, Markdown and the page show the same ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    mark = "Smoke test: " if results["smoke_test"] else ""
    return [replace(table, title=mark + table.title) for table in made if table.rows]


def accuracy_table(results: Mapping[str, Any]) -> ReportTable:
    """Accuracy by feedback passes, a line for each task and their mean."""
    tasks, mean = results["tasks"], results["mean"]
    names = _evaluations(results)
    baseline = any("baseline" in task for task in tasks.values())

    def scores(found: Mapping[str, Any]) -> list[str]:
        return [*(score(found["readings"].get(name)) for name in names), *([score(found.get("baseline"))] if baseline else [])]

    rows = [[name, task["metric"], str(task["shots"]), str(task["documents"]), *scores(task)] for name, task in tasks.items()]
    if mean:
        rows.append(["mean of tasks", "", "", "", *scores(mean)])
    columns = ["task", "metric", "examples", "documents", *map(passes_label, names), *(["baseline"] if baseline else [])]
    notes = [
        "Percent ± standard error over documents; the mean's is the tasks' errors added in quadrature, divided by their number (Fig. 4)."
    ]
    notes += [f"{name}: {task['note']}." for name, task in tasks.items() if task["note"]]
    return ReportTable("Accuracy by feedback passes", columns, rows, notes, 2)


def differences_table(results: Mapping[str, Any]) -> ReportTable:
    """Is the difference real? Paired on the same documents."""
    found = {name: task["differences"] for name, task in results["tasks"].items()}
    found["mean of tasks"] = (results["mean"] or {}).get("differences", [])
    note = "Paired on the same documents. McNemar: documents that only the first, or only the second, answered correctly; exact, two-sided."
    return _paired_table("Differences", "task", found, note)


def pairs_table(results: Mapping[str, Any]) -> ReportTable:
    found = {benchmark["label"]: benchmark["pairs"] for benchmark in results["generative"].values()}
    note = "Each mode at its own temperature. McNemar counts problems for which one of the first k samples is correct."
    return _paired_table("Modes against each other", "benchmark", found, note)


def _paired_table(title: str, what: str, differences: Mapping[str, Sequence[Mapping[str, Any]]], note: str) -> ReportTable:
    rows = [[name, *_difference(one)] for name, own in differences.items() for one in own]
    return ReportTable(title, [what, "second − first", "difference", "only first", "only second", "p"], rows, [note], 2)


def modes_table(results: Mapping[str, Any]) -> ReportTable:
    """Fig. 5 and Table 1: a line for each benchmark, a column for each mode."""
    benchmarks = results["generative"].values()
    modes = list(next(iter(benchmarks))["modes"])
    baseline = any("baseline" in found for found in benchmarks)
    rows = []
    for found in benchmarks:
        cells = [f"{score(found['modes'][mode]['score'])}{_interval(found['modes'][mode])}" for mode in modes]
        own = [score(found.get("baseline", {}).get("score"))] if baseline else []
        rows.append([found["label"], _measure(found), str(found["problems"]), *cells, *own])
    notes = [
        "Percent ± standard error over problems; in brackets Wilson's 95% interval, where each problem has one answer. "
        "Where a temperature was chosen on these very problems the score flatters: see the next tables.",
        *(f"{found['label']}: {text}" for found in benchmarks if (text := _losses(found))),
    ]
    columns = ["benchmark", "measure", "problems", *(MODES[mode] for mode in modes), *(["baseline"] if baseline else [])]
    return ReportTable("Free-form generation by mode", columns, rows, notes, 2)


def temperature_table(results: Mapping[str, Any]) -> ReportTable:
    """Fixed temperatures, the best, and the split-half choice."""
    sampled = [(found["label"], MODES[mode], own) for found, mode, own in _modes(results) if found["n"] > 1]
    temperatures = list(dict.fromkeys(temperature for _, _, own in sampled for temperature in own["fixed"]))
    rows = []
    for label, mode, own in sampled:
        fixed = [score(own["fixed"].get(temperature)) for temperature in temperatures]
        rows.append([label, mode, *fixed, f"{score(own['score'])} (at {own['temperature']:g})", score(own["split_half"])])
    notes = [
        "best: chosen on the problems it reports, as the paper does. split-half: chosen on one half, reported on the other, both ways."
    ]
    columns = ["benchmark", "mode", *(f"T = {temperature}" for temperature in temperatures), "best", "split-half"]
    return ReportTable("Temperatures", columns, rows, notes, 2)


def lengths_table(results: Mapping[str, Any]) -> ReportTable:
    """Fig. 6."""
    rows = []
    for found, mode, own in _modes(results):
        lengths = own["lengths"]
        quartiles = [_whole(lengths[part]) for part in ("lower_quartile", "median", "upper_quartile")]
        counts = [str(count) for count in (lengths["finished"], lengths["truncated"], own["undecided"])]
        rows.append([found["label"], MODES[mode], *quartiles, *counts])
    columns = ["benchmark", "mode", "lower quartile", "median tokens", "upper quartile", "ended", "cut at the limit", "undecided"]
    notes = ["Tokens of complete answers; those cut off at the limit would have been longer. Counted over samples, not problems."]
    return ReportTable("Length of answers", columns, rows, notes, 2)


def paper_tables(results: Mapping[str, Any]) -> list[ReportTable]:
    """Tables 1 and 2 beside the same measurements here."""
    paper = json.loads(PAPER.read_text(encoding="utf-8"))
    made = []
    second, tasks, mean = paper["table_2"], results["tasks"], results["mean"]
    if results["plan"]["suite"] == "paper-0shot":
        rows = [
            [name, *(f"{value:.2f}" for value in values), f"{sum(values) / len(values):.2f}"] for name, values in second["rows"].items()
        ]
        for name in _evaluations(results):
            cells = [score(found["readings"][name]) for found in (*(tasks[task] for task in second["tasks"]), mean)]
            rows.append([f"here: {passes_label(name)}", *cells])
        if "baseline" in mean:
            rows.append(["here: baseline", *(score(found["baseline"]) for found in (*(tasks[task] for task in second["tasks"]), mean))])
        made.append(ReportTable("Table 2 of the paper, and here", ["model", *second["tasks"], "mean"], rows, [second["about"] + "."]))
    first = paper["table_1"]
    if results["generative"] and results["plan"]["prompts"] == "chat":
        names = [name for name in first["rows"] if name in results["generative"]]
        found = [results["generative"][name] for name in names]
        rows = [[column, *(f"{first['rows'][name][place]:.2f}" for name in names)] for place, column in enumerate(first["columns"])]
        for mode in results["plan"]["modes"]:
            rows.append([f"here: {MODES[mode]}", *(score(own["modes"][mode]["score"]) for own in found)])
        if results["baseline"]:
            rows.append(["here: baseline", *(score(own["baseline"]["score"]) for own in found)])
        columns = ["model", *(own["label"] for own in found)]
        made.append(ReportTable("Table 1 of the paper, and here", columns, rows, [first["about"] + "."]))
    return made


def score(found: Mapping[str, Any] | None) -> str:
    """Percent with its error: 45.1 ± 1.2."""
    if found is None or found["value"] is None:
        return "-"
    error = found["error"]
    return f"{100 * found['value']:.1f}" + ("" if error is None or math.isnan(error) else f" ± {100 * error:.1f}")


def signed(difference: Mapping[str, Any]) -> str:
    shown = score(difference)
    return shown if shown.startswith("-") else f"+{shown}"


def mcnemar_cells(test: Mapping[str, Any] | None, missing: str) -> list[str]:
    return [str(test["only_first"]), str(test["only_second"]), f"{test['p_value']:.3g}"] if test else [missing] * 3


def passes_label(name: str) -> str:
    return {"0": "0 passes", "1": "1 pass", "soft": "Soft"}.get(name, f"{name} passes" if name.isdecimal() else name)


def _evaluations(results: Mapping[str, Any]) -> list[str]:
    """By how many feedback passes tasks were evaluated."""
    return list(dict.fromkeys(name for task in results["tasks"].values() for name in task["readings"]))


def _modes(results: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
    """(benchmark, mode, its results)."""
    return [(found, mode, own) for found in results["generative"].values() for mode, own in found["modes"].items()]


def _difference(one: Mapping[str, Any]) -> list[str]:
    names = [MODES.get(name) or passes_label(name) for name in (one["second"], one["first"])]
    return [" − ".join(names), signed(one["difference"]), *mcnemar_cells(one.get("mcnemar"), "-")]


def _measure(found: Mapping[str, Any]) -> str:
    return f"Pass@{found['k']}" + (f" of {found['n']}" if found["n"] > 1 else ", greedy")


def _interval(mode: Mapping[str, Any]) -> str:
    return "" if mode["wilson"] is None else " ({:.1f} to {:.1f})".format(*(100 * bound for bound in mode["wilson"]))


def _losses(found: Mapping[str, Any]) -> str:
    cut = max(mode["cut_prompts"] for mode in found["modes"].values())
    return f"{cut} prompts did not fit the context with {found['new_tokens']} new tokens and lost their beginning." if cut else ""


def _whole(number: float | None) -> str:
    return "-" if number is None or math.isnan(number) else f"{number:.0f}"
