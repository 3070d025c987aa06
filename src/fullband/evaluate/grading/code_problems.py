"""Code problems: rows of HumanEval and MBPP, and the program that judges a completion."""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullband.evaluate.sandbox import Program

HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # of a completion of the prompt; a chat answer has none
MBPP_STOPS = ("[DONE]",)

_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = {"python", "py", "python3", ""}


@dataclass(frozen=True)
class CodeProblem:
    """One problem.

    name         task and number
    prefix       code that stands before every completion: HumanEval's prompt, nothing for MBPP
    tests        run against prefix + completion
    reference    the completion that comes with the problem
    entry_point  the function to write, if the problem names it
    overrides    names of built-ins that the solution has to define
    """

    name: str
    prefix: str
    tests: str
    reference: str
    entry_point: str | None
    overrides: tuple[str, ...] = ()

    def program(self, completion: str) -> Program:
        """What to run for a completion, already truncated or taken out of its answer."""
        whole = self.entry_point is not None and re.search(rf"^def {re.escape(self.entry_point)}\b", completion, re.MULTILINE)
        # A chat answer repeats the function: the prompt before it, a function of a docstring only, still brings imports and other functions
        return Program(f"{self.prefix}\n{completion}" if whole else self.prefix + completion, self.tests, self.overrides)


def humaneval_problem(row: Mapping[str, Any]) -> CodeProblem:
    """A row of openai_humaneval. Raises ValueError naming the columns that are missing."""
    _need(row, "HumanEval", "task_id", "prompt", "test", "entry_point", "canonical_solution")
    tests = f"{row['test']}\ncheck({row['entry_point']})\n"
    overrides = _built_ins_of(row["prompt"] + row["canonical_solution"])
    return CodeProblem(str(row["task_id"]), row["prompt"], tests, row["canonical_solution"], row["entry_point"], overrides)


def mbpp_problem(row: Mapping[str, Any]) -> CodeProblem:
    """A row of MBPP (full). Raises ValueError naming the columns that are missing."""
    _need(row, "MBPP", "task_id", "code", "test_setup_code", "test_list")
    tests = "\n".join([row["test_setup_code"], *row["test_list"], ""])
    return CodeProblem(f"MBPP/{row['task_id']}", "", tests, row["code"], None, _built_ins_of(row["code"]))


def _built_ins_of(reference: str) -> tuple[str, ...]:
    """Built-in names that the reference defines."""
    names = {match[1] for match in re.finditer(r"^(?:def|class)\s+(\w+)", reference, re.MULTILINE)}
    return tuple(sorted(name for name in names if hasattr(builtins, name)))


def _need(row: Mapping[str, Any], benchmark: str, *columns: str) -> None:
    missing = [column for column in columns if column not in row]
    if missing:
        raise ValueError(f"{benchmark}: a row lacks {', '.join(missing)}; it has {', '.join(row) or 'nothing'}")


def truncate(completion: str, stops: Sequence[str]) -> str:
    """What stands before the earliest of the stop sequences."""
    ends = [end for stop in stops if (end := completion.find(stop)) >= 0]
    return completion[: min(ends, default=len(completion))]


def fenced_code(answer: str) -> str:
    """The Python of a chat answer: its first fenced block marked as Python or not marked, an unfinished one too; else all of it."""
    for language, code in _FENCED.findall(answer):
        if language.lower() in _PYTHON:
            return code
    return answer
