"""Several evaluations side by side: the scores of each, and paired differences to the first on what both were asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fullband.evaluate.plan import read_plan
from fullband.evaluate.report.results import SMOKE, Gathered, build_results, find_shards, plan_of
from fullband.evaluate.report.scores import difference_of
from fullband.evaluate.report.tables import MODES, ReportTable, mcnemar_cells, passes_label, score, signed
from fullband.evaluate.statistics import Rollouts, mean_estimate, pass_at_k


@dataclass(frozen=True)
class Scored:
    """One run on one benchmark in one way: a score for each document or problem, by its identity."""

    run: str
    benchmark: str
    way: str
    values: dict[Any, float]


def compare_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Benchmark, way, run, score; and, but for the first of a benchmark and way, the paired difference to the first run.

    Raises ValueError for a folder without a finished evaluation, and where nothing is shared."""
    found = [_scored(folder) for folder in folders]
    first = {(one.benchmark, one.way): one for one in found[0]}
    rows = []
    for key, own in first.items():
        rows.append(_row(own, None))
        for run in found[1:]:
            rows += [_row(other, own) for other in run if (other.benchmark, other.way) == key]
    if len(rows) == len(first):
        raise ValueError(f"{folders[0]}: no other run has one of its benchmarks with the same feedback passes or mode")
    return rows


def comparison_table(rows: Sequence[dict[str, Any]]) -> ReportTable:
    made = []
    for row in rows:
        cells = [signed(row["difference"]) if row["difference"] else "", *mcnemar_cells(row["mcnemar"], "")]
        made.append([row["benchmark"], row["way"], row["run"], str(row["score"]["count"]), score(row["score"]), *cells])
    smallest = min(row["score"]["count"] for row in rows)
    title = "Smoke test: Runs side by side" if smallest < SMOKE else "Runs side by side"
    columns = ["benchmark", "passes or mode", "run", "problems", "score", "to the first", "only first", "only this", "p"]
    return ReportTable(title, columns, made, ["Percent ± standard error; differences are paired over what both evaluated."], 3)


def _scored(folder: Path) -> list[Scored]:
    shards = find_shards(folder)
    plan, results = plan_of(shards[0]), build_results(folder)
    held = Gathered(shards, plan)
    name = f"{folder.name} ({Path(read_plan(shards[0])['model']['name']).name})"
    made = []
    for task in plan.tasks:
        metric = results["tasks"][task]["metric"]
        documents = held.scores(task)
        for passes in documents[0]["scores"]:
            values: dict[Any, float] = {
                (one["task"], one["document"], one["prompt_hash"]): one["scores"][passes][metric] for one in documents
            }
            made.append(Scored(name, task, passes_label(passes), values))
    for task in plan.generative:
        own = results["generative"][task]
        for mode, about in own["modes"].items():
            setting = next(one for one in plan.settings(task) if one.mode == mode and one.temperature == about["temperature"])
            verdicts = {number: held.grades[setting.key(number)]["verdicts"] for number in held.tasks[task]["problems"]}
            values = {(number, own["k"]): pass_at_k(Rollouts(len(v), v.count("right")), own["k"]) for number, v in verdicts.items()}
            made.append(Scored(name, task, MODES[mode], values))
    return made


def _row(own: Scored, first: Scored | None) -> dict[str, Any]:
    row: dict[str, Any] = {"benchmark": own.benchmark, "way": own.way, "run": own.run, "difference": None, "mcnemar": None}
    row["score"] = asdict(mean_estimate(list(own.values.values())))
    if first is not None:
        shared = [key for key in first.values if key in own.values]
        if not shared:
            raise ValueError(f"{own.benchmark}: {own.run} and {first.run} evaluated nothing in common (other data, examples, limit or k)")
        one, other = ([run.values[key] for key in shared] for run in (first, own))
        found = difference_of(first.run, one, own.run, other)
        row |= {key: found[key] for key in ("difference", "mcnemar")}
    return row
