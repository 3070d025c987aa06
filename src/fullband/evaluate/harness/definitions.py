"""lm-eval's task definitions, found by name without reading all of them, and suites of them.

lm-eval's own index parses some fourteen thousand yaml files, which takes ten seconds and more. A search for lines that name a task takes
one; the definitions that are wanted are then read by lm-eval itself.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fullband.data.optional import optional

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
GENERATIVE = ("gsm8k", "math500", "humaneval", "mbpp")  # §4.2
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
    near = difflib.get_close_matches(name, [*SUITES, *GENERATIVE, *groups, *tasks], n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `fullband lm-eval ls tasks` lists them"
    raise ValueError(f"unknown task '{name}'{hint}")
