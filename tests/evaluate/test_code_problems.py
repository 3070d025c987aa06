"""HumanEval and MBPP: programs are assembled as the benchmarks say, and every reference solution passes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from fullband.evaluate.grading.chat_code import fenced_code
from fullband.evaluate.grading.code_problems import (
    HUMANEVAL_STOPS,
    MBPP_STOPS,
    CodeProblem,
    humaneval_problem,
    mbpp_problem,
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
def test_the_stops_leave_the_answer(completion, stops, kept):
    """A completion ends at the first of them."""
    assert min((completion.partition(stop)[0] for stop in stops), key=len, default=completion) == kept


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Sure:\n```python\ndef f(): pass\n```\nIt works. ```x```", "def f(): pass\n"),
        ("```\na = 1\n```\n```python\nb\n```", "b\n"),  # the marked one
        ("```bash\npip install x\n```\n```py\nb = 1\n```", "b = 1\n"),
        ("```python\ncut off", "cut off"),
        ("def f(): pass", "def f(): pass"),
    ],
)
def test_code_of_a_chat_answer(answer, code):
    assert fenced_code(answer) == code


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```\n>>> f(1)\n2\n```\n```python\ndef f(x): return x\n```", "def f(x): return x\n"),
        (
            "```python\nimport math\n```\nthen\n```python\ndef f(x):\n    return math.sqrt(x)\n```",
            "import math\ndef f(x):\n    return math.sqrt(x)\n",
        ),
        ("1. First:\n   ```python\n   def f(x):\n       return x\n   ```\n", "def f(x):\n    return x\n"),
        ("- ```python\n  def f(x):\n      return x\n  ```\n", "def f(x):\n    return x\n"),
        (
            '```python\ndef f(x):\n    """Doc\n    ```\n    f(1)\n    ```\n    """\n    return x\n```\nDone',
            'def f(x):\n    """Doc\n    ```\n    f(1)\n    ```\n    """\n    return x\n',
        ),
        ("def f(x):\n    return x\n```\nIt works.", "def f(x):\n    return x\n"),
        ("    return x\n```\nIt works.", "    return x\n"),
        ("```python\ndef f(x):\n    return x```\nIt works.", "def f(x):\n    return x\n"),
        ("```python\ndef f(x):\n    return x```", "def f(x):\n    return x\n"),
        ("~~~python\ndef f(x):\n    return x\n~~~", "def f(x):\n    return x\n"),
        ("<think>\n```python\ndef f(x): return 1\n```\n</think>\n```python\ndef f(x): return x\n```", "def f(x): return x\n"),
        ("<think>```python\ndef f(x): return 1\n```</think>def f(x): return x", "def f(x): return x"),
        (
            "```python\ndef f(x): return 1\n```\nNo:\n```python\ndef f(x): return x\n```\nUse\n```python\nprint(f(2))\n```",
            "def f(x): return x\n",
        ),
        ("```python\ndef f(x): return 1\n```python\ndef f(x): return x\n```", "def f(x): return x\n"),
        ("```python\ndef f(x): return g(x)\n```\n```python\ndef g(x): return x\n```", "def g(x):\n    return x\ndef f(x): return g(x)\n"),
        ("Answer: ```python\ndef f(x):\n    return x\n```\n", "def f(x):\n    return x\n"),
        ("> ```python\n> def f(x):\n>     return x\n> ```", "def f(x):\n    return x\n"),
        ("````python\ndef f(x):\n    return x\n````", "def f(x):\n    return x\n"),
        ("```text\ndef f(x): return x\n```", "def f(x): return x\n"),  # whatever its mark, if it is Python
        ("```python:f.py\ndef f(x): return x\n```\n```ruby\ndef f(x)\n  x\nend\n```", "def f(x): return x\n"),
        ("```{python}\ndef f(x): return x\n```\n```\nf(1) = 1\n```", "def f(x): return x\n"),
        ("```python\ndef f(x): return x\n```\nIts signature:\n```python\ndef f(x: int) -> int:\n```", "def f(x): return x\n"),
        ("```python\ndef f(x): return x\n```\nthat is\n```python\ndef f(x): ...\n```", "def f(x): return x\n"),
        ("```python\ndef f(x):\n    # as ```x```\n    return x\n```", "def f(x):\n    # as ```x```\n    return x\n"),
        ("```python\nreturn x\n```", "    return x\n"),
        ("```python\n        if x:\n            return x\n```", "    if x:\n        return x\n"),
        ("Sure!\n\nimport re\ndef f(x):\n    return x\n\nIt is x.\nDone.\n", "import re\ndef f(x):\n    return x\n\n"),
        ("Sure!\n\ndef f(x):\n    return x\n", "def f(x):\n    return x\n"),
        ("<code>\ndef f(x):\n    return x\n</code>", "def f(x):\n    return x\n"),
        ("[PYTHON]\ndef f(x):\n    return x\n[/PYTHON]", "def f(x):\n    return x\n"),
        ("```python\nC = tuple([1])\n```\n```python\ndef f(x): return C\n```", "C = tuple([1])\ndef f(x): return C\n"),
        (
            "```python\nC: int = 1\nA, B = 1, 2\n```\n```python\ndef f(x): return C + B\n```",
            "C: int = 1\nA, B = (1, 2)\ndef f(x): return C + B\n",
        ),
        ("```python\nB = 2\nA = B + 1\n```\n```python\ndef f(x): return A + B\n```", "B = 2\nA = B + 1\ndef f(x): return A + B\n"),
        ("```python\ny = f(2)\nz = input()\n```\n```python\ndef f(x): y = z = x; return y\n```", "def f(x): y = z = x; return y\n"),
        (
            "<think>draft</think>```python\nfrom math import *\n```\n```python\ndef f(x):\n    return sqrt(x)\n```",
            "from math import *\ndef f(x):\n    return sqrt(x)\n",
        ),
    ],
)
def test_the_last_draft_that_defines_the_function_counts(answer, code):
    assert fenced_code(answer, "f") == code


@pytest.mark.parametrize(
    "text",
    [
        "```\n" * 25_000,
        "```python\n'''\n```\n" * 5_000,
        " " * 100_000,
        "- " * 50_000,
        "Sure\ndef f(x):\n" + "    x = x\n" * 20_000 + "It is\n" * 5_000,
        "".join(f"```python\nv{i}=v{i + 1}\n```\n" for i in range(3_000)),
    ],
)
def test_finding_code_takes_linear_time(text):
    started = time.monotonic()
    fenced_code(text, "f")
    assert time.monotonic() - started < 5


def test_future_imports_of_an_answer_stand_before_the_prompt(sandbox):
    answer = "from __future__ import annotations\n\ndef root(x: Unknown) -> float:\n    return sqrt(x)\n"
    assert sandbox.run(humaneval_problem(ROW).program(answer)).passed


def test_the_harness_own_future_imports_do_not_reach_a_solution(sandbox):
    assert sandbox.run(humaneval_problem(ROW).program("    return sqrt(x)\n\ndef g(x: Unknown): pass\n")).outcome == "broken"
    code = "    return sqrt(x) if root.__annotations__['x'] is float else 0\n"
    assert sandbox.run(humaneval_problem(ROW).program(code)).passed


def test_a_solution_is_not_judged_by_its_own_copy_of_a_helper(sandbox):
    row = ROW | {
        "prompt": 'def double(x):\n    return 2 * x\n\ndef half(x):\n    """Undo double."""\n',
        "entry_point": "half",
        "canonical_solution": "    return x / 2\n",
        "test": "def check(candidate):\n    assert candidate(double(4)) == 4\n",
    }
    problem = humaneval_problem(row)
    assert sandbox.run(problem.program(problem.reference)).passed
    assert sandbox.run(problem.program("    return x\n\ndef double(x):\n    return x\n")).outcome == "failed"
    row = MBPP_ROW | {
        "code": "import sys\ndef size(x): return sys.getsizeof(x)",
        "test_setup_code": "",
        "test_list": ["assert size(1) == sys.getsizeof(1)"],
    }
    problem = mbpp_problem(row)
    assert problem.entry_point == "size" and sandbox.run(problem.program(problem.reference)).passed
    cheat = "class sys:\n    getsizeof = staticmethod(lambda x: 0)\ndef size(x): return 0\n"
    assert sandbox.run(problem.program(cheat)).outcome == "failed"


def test_missing_columns_are_named():
    with pytest.raises(ValueError, match="HumanEval: a record lacks test, canonical_solution"):
        humaneval_problem({"task_id": 1, "prompt": "", "entry_point": ""})
    with pytest.raises(ValueError, match=r"MBPP: a record lacks task_id, code, .*it has text"):
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


@pytest.mark.slow(minutes=2)
@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["mbpp", "humaneval"])
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
