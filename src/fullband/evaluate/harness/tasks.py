"""lm-eval's tasks ready to run: official prompts, local data where it is given, the number of examples that was asked for; and suites of
them.

Definitions are found by name without parsing all of them: lm-eval's own index parses some fourteen thousand yaml files, which takes ten
seconds and more. A search for lines that name a task takes one; the definitions that are wanted are then read by lm-eval itself.

What differs from the official definition stands in an overlay: a yaml that includes the official one and changes only where the data
lies, which splits there are, and the number of examples. lm-eval reads the overlays and nothing else.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from fullband.data.hub import check_hub
from fullband.data.optional import optional

FEW_SHOT_SEED = 1234  # lm-eval's default: the examples are those of everybody's runs


_NAME = re.compile(rb"""^["']?(task|group)["']?[ \t]*:[ \t]*["']?([\w.:+-]+)["']?[ \t]*(?:#.*)?\r?$""", re.MULTILINE)
_MMLU = "mmlu/default"  # its subjects: the group's members are named by tags, in other files


@dataclass(frozen=True)
class Suite:
    """Tasks and the number of examples before each question; None = the task's own."""

    tasks: tuple[str, ...]
    shots: int | None


PAPER_TASKS = ("rte", "truthfulqa_mc2", "arc_easy", "arc_challenge", "boolq", "piqa", "winogrande", "openbookqa", "copa", "mmlu")
SUITES = {
    "paper-mc": Suite(PAPER_TASKS, 5),  # Fig. 4 right
    "paper-0shot": Suite(("winogrande", "piqa", "openbookqa", "arc_easy", "arc_challenge"), 0),  # Table 2
}
GENERATIVE_NAMES = ("gsm8k", "math500", "humaneval", "mbpp")  # §4.2
SHOT_OVERRIDES = {
    "truthfulqa_mc2": "its own definition has no examples but the six questions that stand in every prompt, and ignores num_fewshot; the "
    "examples come from the questions themselves, never the one that is asked"
}


def folder() -> Path:
    """Where lm-eval keeps its definitions. Raises ValueError without lm-eval."""
    return Path(optional("lm_eval", "evaluation", "evaluate").__file__).parent / "tasks"


@functools.cache
def definitions() -> tuple[dict[str, Path], dict[str, Path]]:
    """(task -> its yaml, group -> its yaml)."""
    found: dict[bytes, dict[str, Path]] = {b"task": {}, b"group": {}}
    for place, _, names in sorted(os.walk(folder())):
        for name in sorted(names):
            if name.endswith(".yaml"):
                path = Path(place, name)
                for kind, task in _NAME.findall(path.read_bytes()):
                    found[kind].setdefault(task.decode(), path)
    return found[b"task"], found[b"group"]


def expand(names: Sequence[str]) -> dict[str, dict[str, Path]]:
    """For each of `names`, the tasks it stands for and their yaml: itself, or the members of a group.

    Raises ValueError, naming the nearest, for a name that lm-eval does not have.
    """
    return {name: _members(name) for name in names}


def _members(name: str) -> dict[str, Path]:
    tasks, groups = definitions()
    if name == "mmlu":
        own = folder() / _MMLU
        return {task: path for task, path in sorted(tasks.items()) if path.parent == own and task.startswith("mmlu_")}
    if name in tasks:
        return {name: tasks[name]}
    if name in groups:
        raise ValueError(f"'{name}' is a group of tasks; name the tasks that you want of it (`fullband lm-eval ls groups` shows groups)")
    near = difflib.get_close_matches(name, [*SUITES, *GENERATIVE_NAMES, *groups, *tasks], n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `fullband lm-eval ls tasks` lists them"
    raise ValueError(f"unknown task '{name}'{hint}")


@dataclass(frozen=True)
class Benchmark:
    """One row of a table: a task, or the tasks of a group, whose documents count alike."""

    name: str
    shots: int | None
    parts: list[Any]  # lm_eval.api.task.Task

    def documents(self, limit: int | None = None) -> dict[str, int]:
        """How many of each part's first documents are taken: `limit` in all, spread evenly."""
        sizes = {part.config.task: len(part.eval_docs) for part in self.parts}
        in_turn = sorted((number, place, name) for place, (name, size) in enumerate(sizes.items()) for number in range(size))
        taken = Counter(name for _, _, name in in_turn[:limit])
        return {name: taken[name] for name in sizes}

    def data_hash(self) -> str:
        """Of all documents asked, in order."""
        whole = hashlib.sha256()
        for part in self.parts:
            for document in part.eval_docs:
                whole.update(json.dumps(document, sort_keys=True, default=str).encode())
        return whole.hexdigest()[:16]


def load_benchmarks(names: Sequence[str], shots: int | None = None, data_dir: Path | None = None) -> list[Benchmark]:
    """The benchmarks of these names, in order. `shots` None = each task's own number.

    data_dir  a folder with a folder for each data set, named as the task is or as the first or last words of its name are; it is read as
              `datasets.load_dataset` reads it. Without it the data come from the hub

    Raises ValueError in one line for an unknown task (the nearest is named), for data that are missing, and for a split that is.
    """
    members = expand(names)
    evaluate_quietly()
    unreachable = check_hub() if data_dir is None else ""
    with TemporaryDirectory() as written:
        for tasks in members.values():
            for task, path in tasks.items():
                overlay = {"include": str(path), "task": task} | _changes(task, path, shots, data_dir)
                Path(written, f"{task}.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
        with code_unrun():
            return [Benchmark(name, shots, _load(list(tasks), written, unreachable)) for name, tasks in members.items()]


def evaluate_quietly() -> None:
    """lm-eval and datasets without their reports and bars. Raises ValueError where lm-eval is missing."""
    optional("lm_eval", "evaluation", "evaluate")
    for name in ("lm_eval", "datasets", "lm-eval"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()


@contextlib.contextmanager
def code_unrun() -> Iterator[None]:
    """lm-eval's definitions of code tasks load a metric that runs a model's code in this process; here they get one that refuses."""
    evaluate: Any = importlib.import_module("evaluate")
    official = evaluate.load

    class Refusing:
        def compute(self, **settings: Any) -> Any:
            if settings.get("references") == ["assert add(2, 3)==5"]:
                return ({}, {})  # tried out when the definition is read
            raise RuntimeError("a model's code is run by fullband.evaluate.sandbox, and by nothing else")

    evaluate.load = lambda name, *args, **kwargs: Refusing() if name == "code_eval" else official(name, *args, **kwargs)
    try:
        yield
    finally:
        evaluate.load = official


def _load(tasks: list[str], overlays: str, unreachable: str) -> list[Any]:
    from lm_eval.tasks import TaskManager

    try:
        manager = TaskManager(include_path=overlays, include_defaults=False)
        loaded: dict[str, Any] = manager.load(tasks)["tasks"]
    except (ValueError, OSError, KeyError, ConnectionError, ImportError) as error:
        shown = ", ".join(tasks[:3]) + (", …" if len(tasks) > 3 else "")
        reason = f"{unreachable}; they are not in the cache" if unreachable else f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{shown}: the data could not be loaded ({reason}); see --data-dir") from None
    return [loaded[task] for task in tasks]


def first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split())[:200]


def _changes(task: str, path: Path, shots: int | None, data_dir: Path | None) -> dict[str, Any]:
    """What the overlay changes."""
    from lm_eval.tasks._yaml_loader import load_yaml

    official = load_yaml(path, resolve_func=False)
    changes: dict[str, Any] = {} if shots is None else {"num_fewshot": shots}
    asked = next((split for key in ("test_split", "validation_split") if (split := official.get(key))), None)
    if task in SHOT_OVERRIDES:
        changes |= {"fewshot_split": asked, "test_split": asked}
    if data_dir is None:
        return changes
    place = _data_folder(task, data_dir)
    found = _splits(place, official.get("dataset_name"))
    if asked not in found:
        raise ValueError(f"{place}: {task} asks questions of the split '{asked}', which is not there (there are: {', '.join(found)})")
    changes["dataset_path"] = str(place.resolve())
    changes["dataset_kwargs"] = (official.get("dataset_kwargs") or {}) | {"cache_dir": str(_cache_folder(place))}
    for key in ("training_split", "validation_split"):
        if official.get(key) and official[key] not in found:
            changes[key] = None
    shown = official.get("fewshot_split") or official.get("training_split")
    samples = (official.get("fewshot_config") or {}).get("samples")
    if shown and shown not in found and not samples:
        changes |= {"fewshot_split": asked, "test_split": asked}  # equal, so that no question is among its own examples
    return changes


def _data_folder(task: str, data_dir: Path) -> Path:
    """Raises ValueError."""
    if not data_dir.is_dir():
        raise ValueError(f"{data_dir}: no such folder of data")
    names = sorted((path.name for path in data_dir.iterdir() if path.is_dir()), key=len, reverse=True)
    for name in names:
        if re.search(rf"(^|_){re.escape(name)}$|^{re.escape(name)}_", task):
            return data_dir / name
    raise ValueError(f"{data_dir}: no data for {task}: a folder named {task}, or as its first or last words are, is needed")


def _cache_folder(place: Path) -> Path:
    """datasets keeps what it has read under the folder's name: two folders of one name, or one that has changed, would be mistaken."""
    from datasets import config

    files = sorted(path for path in place.rglob("*") if path.is_file())
    stamps = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return Path(config.HF_DATASETS_CACHE) / "fullband" / hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]


def _splits(place: Path, configuration: str | None) -> list[str]:
    """Names of the splits of a local data set. Raises ValueError if it can't be read."""
    from datasets import get_dataset_split_names

    try:
        return list(get_dataset_split_names(str(place.resolve()), configuration))
    except Exception as error:  # datasets raises of every kind
        raise ValueError(f"{place}: not a readable data set ({type(error).__name__}: {first_line(error)})") from None


def offline() -> None:
    """Local data need no network: without it, hub libraries would ask for what they have."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
