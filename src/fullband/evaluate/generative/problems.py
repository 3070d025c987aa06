"""Problems with free-form answers (§4.2): the prompt, and what is needed to judge an answer.

Base prompts are lm-eval's own, with their examples. Chat prompts have none: the question in one turn, in the model's own chat template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fullband.data.chat_template import ChatTemplate, Message
from fullband.evaluate.grading.code_problems import HUMANEVAL_STOPS, MBPP_STOPS, CodeProblem, humaneval_problem, mbpp_problem
from fullband.evaluate.grading.math_answers import math_answer

Prompts = Literal["base", "chat"]


@dataclass(frozen=True)
class Problem:
    """`number` in its benchmark, from 0; the question alone, for people; the prompt as text; strings that end an answer; and what judges
    it: GSM8K's solution, the answer of MATH, or a program's tests."""

    number: int
    question: str
    prompt: str
    stops: tuple[str, ...]
    reference: str | CodeProblem


@dataclass(frozen=True)
class GenerativeTask:
    """A benchmark of §4.2.

    name         as users and reports call it
    task         lm-eval's definition
    new_tokens   tokens an answer may have, unless the user says
    sampled      code: several rollouts at several temperatures; mathematics: one greedy answer
    field        where a document has its question
    question     the user's turn of a chat prompt
    reference    what judges an answer; raises ValueError for a document that has none
    stops        strings that end an answer to a base prompt; None = lm-eval's
    """

    name: str
    label: str
    task: str
    new_tokens: int
    sampled: bool
    field: str
    question: Callable[[Mapping[str, Any]], str]
    reference: Callable[[Mapping[str, Any]], str | CodeProblem]
    stops: tuple[str, ...] | None = None


def _math_reference(document: Mapping[str, Any]) -> str:
    found = document.get("answer") or math_answer(str(document["solution"]))
    if not found:
        raise ValueError(f"math500: a solution without an answer: {str(document['solution'])[-60:]!r}")
    return str(found)


_STEPS = "{}\n\nReason step by step. End with a line that holds #### and the number alone."
_BOXED = "{}\n\nReason step by step, and put the final answer into \\boxed{{}}."
_FUNCTION = "Write this Python function. Answer with the whole function, in one block.\n\n```python\n{}```"
_TESTED = "{}\n\nThe code must pass these tests:\n\n```python\n{}\n```\n\nAnswer with the code alone, in one block."
GSM8K = GenerativeTask(
    name="gsm8k",
    label="GSM8K",
    task="gsm8k",
    new_tokens=512,
    sampled=False,
    field="question",
    question=lambda document: _STEPS.format(document["question"]),
    reference=lambda document: str(document["answer"]),
)
MATH500 = GenerativeTask(
    name="math500",
    label="MATH-500",
    task="minerva_math500",
    new_tokens=1024,
    sampled=False,
    field="problem",
    question=lambda document: _BOXED.format(document["problem"]),
    reference=_math_reference,
)
HUMANEVAL = GenerativeTask(
    name="humaneval",
    label="HumanEval",
    task="humaneval",
    new_tokens=512,
    sampled=True,
    field="prompt",
    question=lambda document: _FUNCTION.format(document["prompt"]),
    reference=humaneval_problem,
    stops=HUMANEVAL_STOPS,
)
MBPP = GenerativeTask(
    name="mbpp",
    label="MBPP",
    task="mbpp",
    new_tokens=512,
    sampled=True,
    field="text",
    question=lambda document: _TESTED.format(document["text"], "\n".join(document["test_list"])),
    reference=mbpp_problem,
    stops=MBPP_STOPS,
)
TASKS = {task.name: task for task in (GSM8K, MATH500, HUMANEVAL, MBPP)}


@dataclass(frozen=True)
class ProblemSet:
    """The problems of a benchmark, and hashes of their data and prompts; `prompts_of_all`: of the whole of which they are a shard."""

    task: GenerativeTask
    prompts: Prompts
    problems: list[Problem]
    data_hash: str
    prompt_hash: str
    prompts_of_all: str = ""


def load_problems(
    task: GenerativeTask,
    prompts: Prompts,
    template: ChatTemplate,
    data_dir: Path | None,
    limit: int | None,
    shard: tuple[int, int] = (0, 1),
) -> ProblemSet:
    """The first `limit` problems, or every n-th of them. Raises ValueError as `load_benchmarks` does."""
    from fullband.evaluate.harness.choice import requests_of
    from fullband.evaluate.harness.tasks import load_benchmarks

    [benchmark] = load_benchmarks([task.task], 0 if prompts == "chat" else None, data_dir)
    problems = []
    for instances in requests_of(benchmark, limit).values():
        for instance in instances:
            text, settings = instance.arguments
            stops = tuple(settings.get("until", ())) if task.stops is None else task.stops
            if prompts == "chat":
                text = template.render([Message(role="user", content=task.question(instance.doc))])
                stops = (template.stop,) if template.stop else ()
            question = str(instance.doc[task.field]).strip()
            problems.append(Problem(instance.doc_id, question, text, stops, task.reference(instance.doc)))
    index, count = shard
    own = [problem for problem in problems if problem.number % count == index]
    of_all = _hash([repr((problem.prompt, problem.stops, problem.reference)) for problem in problems])
    return ProblemSet(task, prompts, own, benchmark.data_hash(), _hash([problem.prompt for problem in own]), of_all)


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", errors="surrogatepass")).hexdigest()[:16]
