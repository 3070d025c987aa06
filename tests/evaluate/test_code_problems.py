"""HumanEval and MBPP: programs are assembled as the benchmarks say, and every reference solution passes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fullband.evaluate.grading.code_problems import (
    HUMANEVAL_STOPS,
    MBPP_STOPS,
    CodeProblem,
    fenced_code,
    humaneval_problem,
    mbpp_problem,
    truncate,
)
from fullband.evaluate.sandbox import Limits, Sandbox, run_all

SHARED = Path(os.environ.get("FULLBAND_SHARED", Path(__file__).parents[3] / "shared")) / "data"
ROW = {
    "task_id": "HumanEval/0",
    "prompt": 'from math import sqrt\n\ndef root(x: float) -> float:\n    """Its square root."""\n',
    "entry_point": "root",
    "canonical_solution": "    return sqrt(x)\n",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n",
}
MBPP_ROW = {
    "task_id": 5,
    "code": "class N:\r\n  v = 0\r\ndef get(n):\r\n  return n.v",
    "test_setup_code": "n = N()\nn.v = 3",
    "test_list": ["assert get(n) == 3", "assert get(N()) == 0"],
}


def problems(name: str) -> list[CodeProblem]:
    path, read = {
        "humaneval": (SHARED / "humaneval/test.jsonl", humaneval_problem),
        "mbpp": (SHARED / "mbpp/mbpp.jsonl", mbpp_problem),
    }[name]
    if not path.is_file():
        pytest.skip(f"{path} is not there: benchmark data stands beside the checkout (FULLBAND_SHARED)")
    return [read(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def test_humaneval_is_prompt_completion_tests_and_check(sandbox):
    problem = humaneval_problem(ROW)
    program = problem.program(problem.reference)
    assert program.solution == ROW["prompt"] + ROW["canonical_solution"]
    assert program.tests == ROW["test"] + "\ncheck(root)\n"
    assert sandbox.run(program).passed
    assert sandbox.run(problem.program("    return x\n")).outcome == "failed"


def test_an_answer_that_repeats_the_function_keeps_the_prompts_imports(sandbox):
    assert sandbox.run(humaneval_problem(ROW).program("def root(x):\n    return sqrt(x)\n")).passed


def test_mbpp_is_code_then_setup_then_tests(sandbox):
    problem = mbpp_problem(MBPP_ROW)
    assert problem.program("x").solution == "x"
    assert problem.tests == "n = N()\nn.v = 3\nassert get(n) == 3\nassert get(N()) == 0\n"
    assert sandbox.run(problem.program(problem.reference)).passed


def test_a_problem_may_ask_for_the_name_of_a_built_in(sandbox):
    row = MBPP_ROW | {"code": "def sum(a, b): return a * b", "test_setup_code": "", "test_list": ["assert sum(2, 5) == 10"]}
    problem = mbpp_problem(row)
    assert problem.overrides == ("sum",) and sandbox.run(problem.program(problem.reference)).passed


@pytest.mark.parametrize(
    ("completion", "stops", "kept"),
    [
        ("    return 1\n\ndef g(): pass\nprint(2)", HUMANEVAL_STOPS, "    return 1\n"),
        ("    return 1\n# done", HUMANEVAL_STOPS, "    return 1"),
        ("    x = 1  # fine\n    if x: return 2\n", HUMANEVAL_STOPS, "    x = 1  # fine\n    if x: return 2\n"),
        ("def f(): pass\n[DONE]\n[BEGIN]", MBPP_STOPS, "def f(): pass\n"),
        ("anything", (), "anything"),
    ],
)
def test_truncation(completion, stops, kept):
    assert truncate(completion, stops) == kept


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Sure:\n```python\ndef f(): pass\n```\nIt works. ```x```", "def f(): pass\n"),
        ("```\na = 1\n```\n```python\nb\n```", "a = 1\n"),
        ("```bash\npip install x\n```\n```py\nb = 1\n```", "b = 1\n"),
        ("```python\ncut off", "cut off"),
        ("def f(): pass", "def f(): pass"),
    ],
)
def test_code_of_a_chat_answer(answer, code):
    assert fenced_code(answer) == code


def test_missing_columns_are_named():
    with pytest.raises(ValueError, match="HumanEval: a row lacks test, canonical_solution"):
        humaneval_problem({"task_id": 1, "prompt": "", "entry_point": ""})
    with pytest.raises(ValueError, match=r"MBPP: a row lacks task_id, code, .*it has text"):
        mbpp_problem({"text": "x"})


@pytest.mark.shared_data
@pytest.mark.parametrize(("name", "count"), [("humaneval", 164), ("mbpp", 974)])
def test_some_references_pass(sandbox, name, count):
    """One in forty, and those that need most of the wire: a problem's own classes, a built-in's name."""
    all_problems = problems(name)
    assert len(all_problems) == count
    special = ("MBPP/367", "MBPP/927", "MBPP/126", "HumanEval/32", "HumanEval/38")
    picked = all_problems[::40] + [p for p in all_problems if p.name in special]
    results = run_all([p.program(p.reference) for p in picked], Sandbox(Limits(seconds=60)), workers=2)
    assert [(p.name, r) for p, r in zip(picked, results, strict=True) if not r.passed] == []


@pytest.mark.slow
@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_all_references_pass(sandbox, name):
    all_problems = problems(name)
    results = run_all([p.program(p.reference) for p in all_problems], Sandbox(Limits(seconds=120)), workers=2)
    assert [(p.name, r) for p, r in zip(all_problems, results, strict=True) if not r.passed] == []


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_empty_completions_fail(sandbox, name):
    """The tests of a problem do not pass by themselves."""
    picked = problems(name)[::60]
    results = run_all([p.program("    pass\n" if p.prefix else "pass") for p in picked], sandbox, workers=2)
    assert {result.outcome for result in results} == {"failed"}
