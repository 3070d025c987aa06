"""Grades of rollouts: right, wrong, or undecided where a grader could not tell in time."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from fullband.evaluate import grading
from fullband.evaluate.generative.problems import Problem, ProblemSet
from fullband.evaluate.generative.rollouts import RolloutSetting
from fullband.evaluate.grading.chat_code import fenced_code
from fullband.evaluate.grading.gsm8k import grade_gsm8k
from fullband.evaluate.grading.math_answers import MathGrader, math_answer
from fullband.evaluate.journal import Journal
from fullband.evaluate.sandbox import Program, Sandbox, run_all

Judge = Callable[[Any, list[str]], tuple[list[str], list[Any]]]  # (reference, texts) -> (verdicts, details)


def grade(
    found: ProblemSet,
    settings: Sequence[RolloutSetting],
    rollouts: Journal,
    grades: Journal,
    *,
    sandbox: Callable[[], Sandbox] = Sandbox,
    workers: int = 1,
    done: Callable[[int], None] = lambda rollouts: None,
) -> None:
    """Put into `grades`, under the rollouts' keys, {"made_of": …, "verdicts": […], "details": […]} of each problem that lacks them.

    made_of  hash of the answers, of what judges them and of the graders: grades that something else made are made again

    sandbox  makes the sandbox when code is to be run
    details  GSM8K: "strict", "chat" or "flexible", the rule that found the number; code: how the run ended; MATH: the answer that was found
    done     gets the number of rollouts graded

    GSM8K's verdict is the official one in base prompts, whose examples show the form; in chat prompts, which only ask for it, the number
    counts by its value, after `####` or the last. Raises ValueError where the sandbox or math-verify is missing.
    """
    chat = found.prompts == "chat"
    waiting = []
    for setting in settings:
        for problem in found.problems:
            key = setting.key(problem)
            texts = [rollout["text"] for rollout in rollouts[key]["rollouts"]] if key in rollouts else []
            made_of = _made_of(found.task.name, chat, problem, texts)
            if texts and (grades.get(key) or {}).get("made_of") != made_of:
                waiting.append((key, problem, texts, made_of))
    if not waiting:
        return
    with _judge(found.task.name, chat, workers, sandbox) as judge:
        for key, problem, texts, made_of in waiting:
            verdicts, details = judge(problem.reference, texts)
            grades.add({key: {"made_of": made_of, "verdicts": verdicts, "details": details}})
            done(len(texts))


@contextmanager
def _judge(name: str, chat: bool, workers: int, sandbox: Callable[[], Sandbox]) -> Iterator[Judge]:
    """The grader of a benchmark."""
    if name == "gsm8k":
        yield partial(_gsm8k, chat)
    elif name == "math500":
        with MathGrader(workers=workers) as grader:
            yield partial(_math, grader)
    else:
        yield partial(_code, sandbox(), workers, chat)


def _made_of(name: str, chat: bool, problem: Problem, texts: list[str]) -> str:
    return hashlib.sha256(repr((grader_hash(), name, chat, problem.reference, texts)).encode()).hexdigest()[:24]


@functools.cache
def grader_hash() -> str:
    """Of the graders' code, the sandbox's and math-verify's version: an answer is graded again by another grader."""
    folder = Path(grading.__file__).parent
    files = [path for part in (folder, folder.parent / "sandbox") for path in sorted(part.rglob("*.py"))]
    try:
        versions = metadata.version("math-verify")
    except metadata.PackageNotFoundError:
        versions = ""
    return hashlib.sha256(b"\0".join([versions.encode(), *(path.read_bytes() for path in files)])).hexdigest()[:16]


def _gsm8k(chat: bool, solution: Any, texts: list[str]) -> tuple[list[str], list[Any]]:
    found = [grade_gsm8k(solution, text) for text in texts]
    details = ["strict" if one.strict else "chat" if chat and one.chat else "flexible" if one.flexible else "" for one in found]
    return ["right" if (one.chat if chat else one.strict) else "wrong" for one in found], details


def _math(grader: MathGrader, reference: Any, texts: list[str]) -> tuple[list[str], list[Any]]:
    answers = [math_answer(text) for text in texts]
    return [*grader.grade_all(reference, answers)], answers


def _code(sandbox: Sandbox, workers: int, chat: bool, problem: Any, texts: list[str]) -> tuple[list[str], list[Any]]:
    """Equal programs are run once."""
    programs = [problem.program(fenced_code(text, problem.entry_point) if chat else text) for text in texts]
    different: list[Program] = list(dict.fromkeys(programs))
    outcomes = dict(zip(different, run_all(different, sandbox, workers=workers), strict=True))
    verdicts = ["right" if outcomes[program].passed else "wrong" for program in programs]
    return verdicts, [f"{outcomes[program].outcome}: {outcomes[program].detail}"[:200] for program in programs]
