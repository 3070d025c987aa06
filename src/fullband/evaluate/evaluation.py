"""Run an evaluation: everything that is finished is on disk at once, so a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullband.evaluate.generative.grades import grade, grader_hash
from fullband.evaluate.generative.problems import TASKS as GENERATIVE
from fullband.evaluate.generative.problems import ProblemSet, load_problems
from fullband.evaluate.generative.rollouts import roll_out, room_for_prompts
from fullband.evaluate.harness.choice import check_metrics, requests_of, score_benchmark
from fullband.evaluate.harness.model import FullBandLM
from fullband.evaluate.harness.tasks import Benchmark, load_benchmarks
from fullband.evaluate.harness.text import HarnessText
from fullband.evaluate.journal import SHAPES, Journal
from fullband.evaluate.plan import JOURNALS, EvaluationPlan
from fullband.evaluate.sandbox import Sandbox
from fullband.feedback.passes import FeedbackModel

Watch = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is


@dataclass(frozen=True)
class Material:
    """The tasks of a plan, loaded: a model and its baseline are asked the same."""

    benchmarks: list[Benchmark]
    problems: list[ProblemSet]


@dataclass(frozen=True)
class Journals:
    """The files of an evaluation.

    scores     log-likelihoods by request, so that not even a batch is lost
    documents  metrics of each document, by task
    rollouts   answers by setting and problem
    grades     of the rollouts
    tasks      what was asked and how long it took, by task
    """

    scores: Journal
    documents: Journal
    rollouts: Journal
    grades: Journal
    tasks: Journal

    @classmethod
    def open(cls, folder: Path) -> Journals:
        """Raises ValueError naming a damaged file."""
        return cls(**{name: Journal(folder / f"{name}.jsonl", SHAPES[name]) for name in JOURNALS})


def is_finished(plan: EvaluationPlan, journals: Journals, name: str) -> bool:
    """Whether a task is done, and all that it found is still there: a damaged line may have been removed."""
    about = journals.tasks.get(f"task/{name}")
    if about is None:
        return False
    if about["kind"] == "task":
        held = sum(key.startswith(f"{name}/") for key, _ in journals.documents.items())
        return bool(held >= about.get("documents", held))  # older evaluations do not say how many there are
    answers = [setting.key(number) for setting in plan.settings(name) for number in about["problems"]]
    if not all(key in journals.rollouts and key in journals.grades for key in answers):
        return False
    made_of = _made_of(journals, answers)  # where a line was removed, an older answer to other data may show
    return bool(about.get("made_of", made_of) == made_of)


def _made_of(journals: Journals, keys: Sequence[str]) -> str:
    return _together([str(part[key].get("made_of")) for key in keys for part in (journals.rollouts, journals.grades)])


def load_material(plan: EvaluationPlan, text: HarnessText, data_dir: Path | None) -> Material:
    """Raises ValueError in one line for unknown tasks, missing data and metrics that can't be averaged."""
    benchmarks = load_benchmarks(plan.tasks, plan.shots, data_dir) if plan.tasks else []
    for benchmark in benchmarks:
        check_metrics(benchmark)
    problems = [load_problems(GENERATIVE[name], plan.prompts, text.template, data_dir, plan.limit, plan.shard) for name in plan.generative]
    return Material(benchmarks, problems)


def hashes(material: Material, plan: EvaluationPlan) -> dict[str, dict[str, str]]:
    """By task, of its data, of all its prompts with what ends or follows them (those of all shards), and of what grades its answers."""
    found = {}
    for benchmark in material.benchmarks:
        asked = [(task, one.doc_id, one.args) for task, own in requests_of(benchmark, plan.limit).items() for one in own]
        found[benchmark.name] = {"data": benchmark.data_hash(), "prompts": _together([repr(one) for one in asked])}
    for problems in material.problems:
        found[problems.task.name] = {"data": problems.data_hash, "prompts": problems.prompts_of_all, "grader": grader_hash()}
    return found


def evaluate(
    model: FeedbackModel,
    text: HarnessText,
    plan: EvaluationPlan,
    material: Material,
    folder: Path,
    *,
    batch_rows: int = 8,
    workers: int = 1,
    sandbox: Callable[[], Sandbox] = Sandbox,
    watch: Watch = lambda what, done, total: None,
) -> None:
    """Fill the folder's journals with what they lack. Raises ValueError as the parts do."""
    for name in plan.generative:
        room_for_prompts(model, plan.settings(name)[0])  # refused before hours of other tasks
    journals = Journals.open(folder)
    lm = FullBandLM(model, plan.modes[0], plan.fused_passes if plan.modes[0] == "fused" else None, text, batch_size=batch_rows)
    lm.seed, lm.journal = plan.seed, journals.scores
    for benchmark in material.benchmarks:
        if not is_finished(plan, journals, benchmark.name):
            _score(lm, benchmark, plan, journals, watch)
    for found in material.problems:
        if not is_finished(plan, journals, found.task.name):
            _answer(model, text, found, plan, journals, batch_rows, workers, sandbox, watch)


def _counter(watch: Watch, what: str, total: int) -> Callable[[int], None]:
    """Counts up what is done of `total`, and shows it to `watch`."""
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        watch(what, done, total)

    return count


def _score(lm: FullBandLM, benchmark: Benchmark, plan: EvaluationPlan, journals: Journals, watch: Watch) -> None:
    started = time.perf_counter()
    watch(benchmark.name, 0, 0)
    lm.watch = lambda total: _counter(watch, benchmark.name, total)
    documents = score_benchmark(lm, benchmark, plan.readings, plan.limit, plan.shard)
    journals.documents.add((f"{benchmark.name}/{one.task}/{one.document}", one.to_json()) for one in documents)
    about = {
        "kind": "task",
        "documents": len(documents),
        "metric": check_metrics(benchmark),
        "shots": benchmark.parts[0].config.num_fewshot,
        "data_hash": benchmark.data_hash(),
        "prompt_hash": [_together([one.prompt_hash for one in documents])],
    }
    journals.tasks.add({f"task/{benchmark.name}": about | {"seconds": time.perf_counter() - started}})


def _answer(
    model: FeedbackModel,
    text: HarnessText,
    found: ProblemSet,
    plan: EvaluationPlan,
    journals: Journals,
    batch_rows: int,
    workers: int,
    sandbox: Callable[[], Sandbox],
    watch: Watch,
) -> None:
    started, name, settings = time.perf_counter(), found.task.name, plan.settings(found.task.name)
    answered = _counter(watch, f"{name}: answers", len(settings) * len(found.problems))
    for setting in settings:
        roll_out(model, text, found.problems, setting, journals.rollouts, batch_rows, answered)
    graded = _counter(watch, f"{name}: grades", sum(setting.n for setting in settings) * len(found.problems))
    grade(found, settings, journals.rollouts, journals.grades, sandbox=sandbox, workers=workers, done=graded)
    about = {
        "kind": "generative",
        "problems": [problem.number for problem in found.problems],
        "data_hash": found.data_hash,
        "prompt_hash": [found.prompt_hash],
        "made_of": _made_of(journals, [setting.key(problem) for setting in settings for problem in found.problems]),
    }
    journals.tasks.add({f"task/{name}": about | {"seconds": time.perf_counter() - started}})


def _together(hashes: Sequence[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def show_prompts(material: Material, plan: EvaluationPlan, count: int = 1) -> list[dict[str, Any]]:
    """For --dry-run: the first `count` prompts of each task, with the continuations whose log-likelihoods are compared."""
    shown: list[dict[str, Any]] = []
    for benchmark in material.benchmarks:
        instances = next(iter(requests_of(benchmark, min(count, plan.limit or count)).values()))
        for number in dict.fromkeys(instance.doc_id for instance in instances):
            own = [instance.args for instance in instances if instance.doc_id == number]
            continuations = [args[1] if isinstance(args[1], str) else None for args in own]
            shown.append({"task": benchmark.name, "document": number, "prompt": own[0][0], "continuations": continuations})
    for found in material.problems:
        for problem in found.problems[:count]:
            shown.append({"task": found.task.name, "document": problem.number, "prompt": problem.prompt, "stops": list(problem.stops)})
    return shown
