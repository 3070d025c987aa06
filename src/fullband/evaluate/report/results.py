"""results.json: an evaluation's numbers, made from what its folder holds, or from the folders of its shards together."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fullband.amounts import without_infinities
from fullband.evaluate.evaluation import Journals, is_finished
from fullband.evaluate.generative.problems import TASKS as GENERATIVE
from fullband.evaluate.harness.tasks import SHOT_OVERRIDES
from fullband.evaluate.journal import Journal
from fullband.evaluate.plan import PLAN, EvaluationPlan, read_plan
from fullband.evaluate.report.scores import mean_of_tasks, summarize, summarize_task
from fullband.files import read_json, write_json

RESULTS, BASELINE = "results.json", "baseline"
SMOKE = 200  # problems; a table of fewer is a smoke test
_PACKAGES = ("fullband", "torch", "transformers", "lm_eval", "datasets", "tokenizers", "math-verify")


def find_shards(folder: Path) -> list[Path]:
    """The folders whose journals make up an evaluation: itself, or its shards in order.

    Raises ValueError if there is no evaluation, if a shard is missing, or if they are not of the same evaluation.
    """
    if (folder / PLAN).is_file():
        return [folder]
    shards = sorted((path for path in folder.glob("shard-*-of-*") if (path / PLAN).is_file()), key=lambda path: plan_of(path).shard)
    if not shards:
        raise ValueError(f"{folder}: no evaluation there (neither {PLAN} nor shards)")
    plans = [whole_plan(path) for path in shards]
    count = plans[0]["shard"][1]
    missing = sorted(set(range(count)) - {plan["shard"][0] for plan in plans})
    if missing:
        raise ValueError(f"{folder}: of {count} shards {', '.join(str(index + 1) for index in missing)} is missing")
    for path, plan in zip(shards, plans, strict=True):
        differing = sorted(key for key in plan if key != "shard" and plan[key] != plans[0][key])
        if differing or plan["shard"][1] != count:
            raise ValueError(
                f"{path}: not a shard of the same evaluation as {shards[0].name} (differs in {', '.join(differing) or 'shard'})"
            )
    return shards


def build_results(folder: Path) -> dict[str, Any]:
    """The numbers of a finished evaluation. Raises ValueError as `find_shards`, and if something is not finished."""
    shards = find_shards(folder)
    asked = plan_of(shards[0])
    own, other = Gathered(shards, asked), gather_baseline(shards, asked)
    tasks = {name: _task(name, own, other) for name in asked.tasks}
    return {
        "model": whole_plan(shards[0])["model"],
        "baseline": whole_plan(shards[0] / BASELINE)["model"] if other else None,
        "plan": {key: value for key, value in asdict(asked).items() if key != "shard"} | {"shards": len(shards)},
        "smoke_test": _smallest(own, asked) < SMOKE,
        "tasks": tasks,
        "mean": _means(list(tasks.values())),
        "generative": {name: _generative(name, asked, own, other) for name in asked.generative},
        "seconds": sum(one["seconds"] for one in own.tasks.values()),
        "versions": _versions(),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "system": platform.system()},
    }


def write_results(folder: Path) -> dict[str, Any]:
    """Write results.json, and return what is in it. A folder that has nothing but results.json, as published ones do, keeps it.

    Raises ValueError as `build_results` does.
    """
    if (folder / RESULTS).is_file() and not (folder / PLAN).is_file() and not any(folder.glob("shard-*-of-*")):
        return read_results(folder / RESULTS)
    found: dict[str, Any] = without_infinities(build_results(folder))
    write_json(folder / RESULTS, found)
    return found


def read_results(path: Path) -> dict[str, Any]:
    """A results.json. Raises ValueError for one of another kind: a probe's has the same name."""
    found: dict[str, Any] = read_json(path)
    for key in ("model", "baseline", "plan", "smoke_test", "tasks", "mean", "generative", "seconds", "versions", "machine"):
        if key not in found:
            raise ValueError(f"{path}: has no '{key}'; it was not written by fullband evaluate")
    return found


class Gathered:
    """What the folders of all shards hold."""

    def __init__(
        self, folders: Sequence[Path], plan: EvaluationPlan, remedy: str = "run the same command again, or with a smaller --limit"
    ):
        """Raises ValueError, which ends with the remedy, if a task is not finished in one of them."""
        self.documents, self.rollouts, self.grades = Journal(), Journal(), Journal()
        self.tasks: dict[str, dict[str, Any]] = {}
        for folder in folders:
            journals = Journals.open(folder)
            for name in (*plan.tasks, *plan.generative):
                if not is_finished(plan, journals, name):
                    raise ValueError(f"{folder}: {name} is not finished; {remedy}")
                self._add(name, journals.tasks[f"task/{name}"])
            for into, part in zip(
                (self.documents, self.rollouts, self.grades), (journals.documents, journals.rollouts, journals.grades), strict=True
            ):
                into.add(part.items())

    def _add(self, name: str, about: dict[str, Any]) -> None:
        held = self.tasks.setdefault(name, {**about, "seconds": 0.0, "prompt_hash": [], "problems": []})
        held["seconds"] += about["seconds"]
        held["prompt_hash"] += about["prompt_hash"]
        held["problems"] = sorted([*held["problems"], *about.get("problems", [])])

    def scores(self, name: str) -> list[dict[str, Any]]:
        found = [record for key, record in self.documents.items() if key.startswith(f"{name}/{record['task']}/")]
        return sorted(found, key=lambda record: (record["task"], record["document"]))


def gather_baseline(shards: Sequence[Path], asked: EvaluationPlan) -> Gathered | None:
    """What stands beside an evaluation in its folders; None where no baseline does.

    Raises ValueError if one is missing or not finished, or if it was asked something else, such as another limit.
    """
    folders = [shard / BASELINE for shard in shards]
    there = [folder for folder in folders if (folder / PLAN).is_file()]
    if not there:
        return None
    model = whole_plan(there[0])["model"]
    again = f"evaluate again with --baseline {model['name']}"
    expected = {"model": model, **asdict(asked.of_baseline())}
    for shard, folder in zip(shards, folders, strict=True):
        if folder not in there:
            raise ValueError(f"{folder}: missing, while {there[0]} is there; {again}, or remove that one")
        held = whole_plan(folder)
        of_data = expected | {"data": _data(whole_plan(shard))} if (shard / PLAN).is_file() else expected
        held = {**held, "data": _data(held)}
        if differing := sorted(key for key in of_data if key != "shard" and held[key] != of_data[key]):
            words = ", ".join(f"limit ({held['limit'] or 'none'} there)" if key == "limit" else key for key in differing)
            raise ValueError(f"{folder}: asked with another {words} than this evaluation; {again}, or remove that folder")
    return Gathered(folders, asked.of_baseline(), f"{again}, or remove that folder")


def _data(held: dict[str, Any]) -> dict[str, str]:
    return {name: one["data"] for name, one in (held["material"] or {}).items()}


def _task(name: str, own: Gathered, other: Gathered | None) -> dict[str, Any]:
    about = own.tasks[name]
    found = summarize_task(own.scores(name), about["metric"], other.scores(name) if other else None)
    note = SHOT_OVERRIDES.get(name) if about["shots"] else None
    return {key: about[key] for key in ("shots", "data_hash", "prompt_hash", "seconds")} | {"note": note} | found


def _means(tasks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Over tasks that were evaluated after the same feedback passes; None for fewer than two tasks."""
    alike = [task for task in tasks if list(task["readings"]) == list(tasks[0]["readings"])]
    return mean_of_tasks(alike) if len(alike) > 1 else None


def _generative(name: str, plan: EvaluationPlan, own: Gathered, other: Gathered | None) -> dict[str, Any]:
    about, task = own.tasks[name], GENERATIVE[name]
    k = plan.k if task.sampled else 1
    found = summarize(plan.settings(name), about["problems"], k, own.rollouts, own.grades)
    if other is not None:
        of_baseline = summarize(plan.of_baseline().settings(name), about["problems"], k, other.rollouts, other.grades)
        found["baseline"] = of_baseline["modes"]["standard"]
    about = {key: about[key] for key in ("data_hash", "prompt_hash", "seconds")}
    return {"label": task.label, "new_tokens": plan.settings(name)[0].new_tokens, **about, **found}


def _smallest(own: Gathered, plan: EvaluationPlan) -> int:
    return min([len(own.scores(name)) for name in plan.tasks] + [len(own.tasks[name]["problems"]) for name in plan.generative])


def plan_of(folder: Path) -> EvaluationPlan:
    """Raises ValueError for a plan of another version, or one that can't be read."""
    held = read_plan(folder)
    if unknown := held.keys() - {"model", "material", *EvaluationPlan.__dataclass_fields__}:
        raise ValueError(f"{folder / PLAN}: not a plan this version can read ({min(unknown)}: unknown)")
    try:
        return TypeAdapter(EvaluationPlan).validate_python({key: value for key, value in held.items() if key not in ("model", "material")})
    except ValidationError as error:
        first = error.errors()[0]
        what = ".".join(map(str, first["loc"])) or "plan"
        raise ValueError(
            f"{folder / PLAN}: not a plan this version can read ({what}: {first['msg'].removeprefix('Value error, ')})"
        ) from None


def whole_plan(folder: Path) -> dict[str, Any]:
    """The model, hashes of data and prompts, and the plan, whole: an older plan.json may lack a key. Raises ValueError as `plan_of`."""
    held = read_plan(folder)
    return {"model": held["model"], "material": held.get("material"), **asdict(plan_of(folder))}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
