"""Code problems: records of HumanEval and MBPP, and the program that judges a completion."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullband.evaluate.grading.chat_code import bound_names, defines, parsed, used_names
from fullband.evaluate.sandbox import Program

HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # of a completion of the prompt; a chat answer has none
MBPP_STOPS = ("[DONE]",)


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
        if self.entry_point is None or not defines(self.entry_point, completion):
            return Program(self.prefix + completion, self.tests, self.overrides)
        # A chat answer repeats the function: the prompt before it, a function of a docstring only, still brings imports and other functions
        future, rest = _future_imports(completion) if self.prefix else ("", completion)
        return Program(f"{future}{self.prefix}\n{rest}" if self.prefix else completion, self.tests, self.overrides)


def _future_imports(code: str) -> tuple[str, str]:
    """`from __future__` lines, which have to stand before the prompt, and the code without them."""
    tree = parsed(code)
    found = [s for s in tree.body if isinstance(s, ast.ImportFrom) and s.module == "__future__"] if tree else []
    if not found or tree is None:
        return "", code
    return "".join(f"{ast.unparse(s)}\n" for s in found), ast.unparse(ast.Module([s for s in tree.body if s not in found], []))


def humaneval_problem(record: Mapping[str, Any]) -> CodeProblem:
    """A record of openai_humaneval. Raises ValueError naming the columns that are missing."""
    _need(record, "HumanEval", "task_id", "prompt", "test", "entry_point", "canonical_solution")
    tests = f"{record['test']}\ncheck({record['entry_point']})\n"
    tests = _given(record["prompt"] + record["canonical_solution"], tests, record["entry_point"]) + tests
    overrides = _built_ins_of(record["prompt"] + record["canonical_solution"])
    return CodeProblem(str(record["task_id"]), record["prompt"], tests, record["canonical_solution"], record["entry_point"], overrides)


def mbpp_problem(record: Mapping[str, Any]) -> CodeProblem:
    """A record of MBPP (full). Raises ValueError naming the columns that are missing."""
    _need(record, "MBPP", "task_id", "code", "test_setup_code", "test_list")
    tests = "\n".join([record["test_setup_code"], *record["test_list"], ""])
    tree = parsed(record["code"])
    functions = [s.name for s in tree.body if isinstance(s, ast.FunctionDef)] if tree else []
    asked = parsed("\n".join(record["test_list"]))
    entry_point = next((name for name in reversed(functions) if asked and name in used_names(asked)), None)
    imports = "\n".join(ast.unparse(s) for s in tree.body if isinstance(s, ast.Import | ast.ImportFrom)) if tree else ""
    tests = _given(imports, tests, "") + tests
    return CodeProblem(f"MBPP/{record['task_id']}", "", tests, record["code"], entry_point, _built_ins_of(record["code"]))


def _given(code: str, tests: str, entry_point: str) -> str:
    """What the problem gives and its tests use, to stand before them: a solution must not be judged by its own copy of a helper."""
    tree, asked = parsed(code), parsed(tests)
    if tree is None or asked is None:
        return ""
    given = [statement for statement in tree.body if (names := bound_names(statement)) and entry_point not in names]
    own = {name for node in ast.walk(asked) if isinstance(node, ast.stmt) for name in bound_names(node)}
    if not any(bound_names(statement) & (used_names(asked) - own) for statement in given):
        return ""
    return "".join(f"{ast.unparse(statement)}\n" for statement in given)


def _built_ins_of(reference: str) -> tuple[str, ...]:
    """Built-in names that the reference defines."""
    names = {match[1] for match in re.finditer(r"^(?:def|class)\s+(\w+)", reference, re.MULTILINE)}
    return tuple(sorted(name for name in names if hasattr(builtins, name)))


def _need(record: Mapping[str, Any], benchmark: str, *columns: str) -> None:
    missing = [column for column in columns if column not in record]
    if missing:
        raise ValueError(f"{benchmark}: a record lacks {', '.join(missing)}; it has {', '.join(record) or 'nothing'}")
