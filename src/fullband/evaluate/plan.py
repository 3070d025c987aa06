"""What an evaluation asks: tasks, feedback passes, modes, sampling. Written beside its results, so that it can go on where it stopped."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fullband.evaluate.generative.problems import TASKS as GENERATIVE
from fullband.evaluate.generative.problems import Prompts
from fullband.evaluate.generative.rollouts import RolloutSetting
from fullband.evaluate.harness.tasks import SUITES
from fullband.feedback_config import FeedbackPasses
from fullband.files import check_place, file_hash, read_json, write_json

PLAN = "plan.json"
JOURNALS = ("scores", "documents", "rollouts", "grades", "tasks")  # files beside it, .jsonl; see `evaluation.Journals`
OF_ONE_LIMIT = ("tasks", "documents")  # those that are made of the others, for the documents that are asked for


@dataclass(frozen=True)
class EvaluationPlan:
    """One evaluation of one model.

    suite         its name, if one was asked for
    tasks         of lm-eval; scored after each of `readings` (feedback passes, or "soft"), in the first of `modes` where they generate
    shots         examples in their prompts; None = each task's own number
    generative    names of §4.2's benchmarks; answered in `modes`, fused with `fused_passes`
    temperatures  of the sampled ones (code): n rollouts at each, scored by Pass@k. The others are answered once, greedily
    new_tokens    tokens an answer may have; None = the benchmark's own number
    limit         documents of each task and problems of each benchmark, the first ones; None = all
    shard         (i, n): every n-th document, from the i-th on, counted from 0
    """

    suite: str | None = None
    tasks: tuple[str, ...] = ()
    shots: int | None = None
    generative: tuple[str, ...] = ()
    readings: tuple[FeedbackPasses | Literal["soft"], ...] = (0,)
    modes: tuple[str, ...] = ("standard",)
    fused_passes: FeedbackPasses = 1
    prompts: Prompts = "base"
    temperatures: tuple[float, ...] = (0.3, 0.5, 0.7)
    n: int = 10
    k: int = 3
    new_tokens: int | None = None
    seed: int = 0
    limit: int | None = None
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        """Raises ValueError for values that mean nothing."""
        index, count = self.shard
        if not 0 <= index < count:
            raise ValueError(f"a shard must be i/n with 1 ≤ i ≤ n, got {index + 1}/{count}")
        if not 1 <= self.k <= self.n:
            raise ValueError(f"n must be at least k for Pass@k, and k at least 1, got n = {self.n}, k = {self.k}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")
        if not self.temperatures or any(not 0 < temperature < math.inf for temperature in self.temperatures):
            raise ValueError("temperatures of code samples must be above 0, since greedy samples are all the same")
        if len({f"{temperature:g}" for temperature in self.temperatures}) < len(self.temperatures):  # answers are kept under it
            raise ValueError(f"temperatures must differ, in six digits, got {', '.join(map(str, self.temperatures))}")
        if not self.tasks and not self.generative:
            raise ValueError("nothing to evaluate: name a task or a suite")

    def settings(self, name: str) -> list[RolloutSetting]:
        """How a benchmark is answered: mode by mode, temperature by temperature."""
        task = GENERATIVE[name]
        temperatures, n = (self.temperatures, self.n) if task.sampled else ((0.0,), 1)
        return [
            RolloutSetting(
                name,
                self.prompts,
                mode,
                self.fused_passes if mode == "fused" else None,
                temperature,
                n,
                self.new_tokens or task.new_tokens,
                self.seed,
            )
            for mode in self.modes
            for temperature in temperatures
        ]

    def of_baseline(self) -> EvaluationPlan:
        """The same for a model without feedback."""
        return replace(self, readings=(0,), modes=("standard",))


def plan_names(names: Sequence[str], suite: str | None) -> dict[str, Any]:
    """Fields of a plan from what a user named: a suite, §4.2's benchmarks, lm-eval's tasks. Raises ValueError for an unknown suite."""
    if suite is not None and suite not in SUITES and suite not in GENERATIVE:
        raise ValueError(f"unknown suite '{suite}' (known: {', '.join([*SUITES, *GENERATIVE])})")
    whole = SUITES.get(suite or "")
    asked = dict.fromkeys([*(whole.tasks if whole else [suite] if suite else []), *names])
    return {
        "suite": suite,
        "tasks": tuple(name for name in asked if name not in GENERATIVE),
        "generative": tuple(name for name in asked if name in GENERATIVE),
        "shots": whole.shots if whole else None,
    }


def check_folder(folder: Path, plan: EvaluationPlan, model: Mapping[str, Any]) -> bool:
    """Whether the folder holds this evaluation already, with this limit or another, or other data: each answer says what made it.

    Raises ValueError if it holds another evaluation, or results of which nobody knows what was asked, or can't be written.
    """
    if not (folder / PLAN).is_file():
        check_place(folder)
        if found := [name for name in JOURNALS if (folder / f"{name}.jsonl").is_file()]:
            raise ValueError(
                f"{folder}: has {found[0]}.jsonl but no {PLAN} that names its model; choose another --output, or remove the whole folder"
            )
        return False
    held, asked = read_plan(folder), _content(plan, model)
    if "files" in asked["model"] and "files" not in held.get("model", {}):
        raise ValueError(f"{folder}: its {PLAN} is older and does not name the model files of its answers; choose another --output")
    if differing := sorted(key for key in asked if held.get(key) != asked[key] and key != "limit"):
        of_model = sorted(key for key in asked["model"] if held["model"].get(key) != asked["model"][key])
        differing = [f"model ({', '.join(of_model)})" if key == "model" else key for key in differing]
        raise ValueError(f"{folder}: holds an evaluation with another {', '.join(differing)}; choose another --output")
    return True


def start(folder: Path, plan: EvaluationPlan, model: Mapping[str, Any], material: Mapping[str, Any] | None = None) -> None:
    """Make the folder, and write into it what is asked; `material` as `evaluation.hashes` gives it.

    Where another limit was, or other data or prompts, tasks are summed up anew; scores and answers stay, and serve where the same is asked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = _content(plan, model) | ({} if material is None else {"material": dict(material)})
    if (folder / PLAN).is_file():
        held = read_plan(folder)
        if all(held.get(key) == content.get(key) for key in ("limit", "material")):
            return
    for name in OF_ONE_LIMIT:
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
    write_json(folder / PLAN, content)


def _content(plan: EvaluationPlan, model: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps({"model": model, **asdict(plan)}))
    return content


def read_plan(folder: Path) -> dict[str, Any]:
    """What the folder's plan.json says. Raises ValueError if it can't be read."""
    try:
        return dict(read_json(folder / PLAN))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{error}; evaluate into another folder (--output), or remove this whole one") from None


def files_hash(folder: Path) -> str:
    """SHA-256 over the files of a model folder that change what it says and are no weights: configurations, tokenizer, template, code;
    and over the commit, if the folder is a hub's snapshot, whose weights may not be here. An evaluation's own files may lie within it."""
    kinds = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab", ".py", ".yaml")
    own = (PLAN, "results.json")
    files = sorted(path for path in folder.rglob("*") if path.suffix in kinds and path.name not in own and path.is_file())
    commit = folder.name if folder.parent.name == "snapshots" else ""
    return hashlib.sha256("\n".join([commit, *(f"{path.relative_to(folder)} {file_hash(path)}" for path in files)]).encode()).hexdigest()


def weights_hash(folder: Path) -> str | None:
    """SHA-256 over the hashes of a model folder's weight files; None if it has none here (a hub id)."""
    files = sorted(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    if not files:
        return None
    return hashlib.sha256("".join(f"{path.name} {file_hash(path)}\n" for path in files).encode()).hexdigest()
