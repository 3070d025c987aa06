"""Grades of rollouts: right, wrong, or undecided where a grader could not tell in time."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from fullband.evaluate import grading
from fullband.evaluate.generative.problems import Problem, ProblemSet
from fullband.evaluate.generative.rollouts import Setting
from fullband.evaluate.grading import MathGrader, fenced_code, grade_gsm8k, math_answer
from fullband.evaluate.grading.code_problems import CodeProblem
from fullband.evaluate.journal import Journal
from fullband.evaluate.sandbox import Program, Sandbox, run_all


def grade(
    found: ProblemSet,
    settings: Sequence[Setting],
    rollouts: Journal,
    grades: Journal,
    *,
    sandbox: Callable[[], Sandbox] = Sandbox,
    workers: int = 1,
    done: Callable[[int], None] | None = None,
) -> None:
    """Put into `grades`, under the rollouts' keys, {"made_of": …, "verdicts": […], "details": […]} of each problem that lacks them.

    made_of  hash of the answers, of what judges them and of the graders: grades that something else made are made again

    sandbox  makes the sandbox when code is to be run
    details  GSM8K: "strict", "chat" or "flexible", the rule that found the number; code: how the run ended; MATH: the answer that was found
    done     gets the number of rollouts graded

    GSM8K's verdict is the official one in base prompts, whose examples show the form; in chat prompts, which only ask for it, the number
    counts by its value, after `####` or the last. Raises ValueError where the sandbox or math-verify is missing.
    """
    waiting = [
        (setting.key(problem), problem, [rollout["text"] for rollout in rollouts[setting.key(problem)]["rollouts"]])
        for setting in settings
        for problem in found.problems
        if setting.key(problem) in rollouts
    ]
    name, chat = found.task.name, found.prompts == "chat"
    made_of = {key: _made_of(name, chat, problem, texts) for key, problem, texts in waiting}
    waiting = [one for one in waiting if (grades.get(one[0]) or {}).get("made_of") != made_of[one[0]]]
    if not waiting:
        return
    if name == "gsm8k":
        grades.add({key: {"made_of": made_of[key]} | _gsm8k(str(problem.reference), texts, chat) for key, problem, texts in waiting})
    elif name == "math500":
        with MathGrader(workers=workers) as grader:
            for key, problem, texts in waiting:
                answers = [math_answer(text) for text in texts]
                verdicts = grader.grade_all([(str(problem.reference), answer) for answer in answers])
                grades.add({key: {"made_of": made_of[key], "verdicts": verdicts, "details": answers}})
                if done is not None:
                    done(len(texts))
        return
    else:
        _code(waiting, made_of, grades, sandbox(), workers, chat, done)
        return
    if done is not None:
        done(sum(len(texts) for _, _, texts in waiting))


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


def _gsm8k(solution: str, texts: list[str], chat: bool) -> dict[str, Any]:
    found = [grade_gsm8k(solution, text) for text in texts]
    details = ["strict" if one.strict else "chat" if chat and one.chat else "flexible" if one.flexible else "" for one in found]
    return {"verdicts": ["right" if (one.chat if chat else one.strict) else "wrong" for one in found], "details": details}


def _code(
    waiting: list[tuple[str, Problem, list[str]]],
    made_of: Mapping[str, str],
    grades: Journal,
    sandbox: Sandbox,
    workers: int,
    chat: bool,
    done: Callable[[int], None] | None,
) -> None:
    """Equal programs are run once."""
    for key, problem, texts in waiting:
        assert isinstance(problem.reference, CodeProblem)
        programs = [problem.reference.program(fenced_code(text, problem.reference.entry_point) if chat else text) for text in texts]
        different: list[Program] = list(dict.fromkeys(programs))
        outcomes = dict(zip(different, run_all(different, sandbox, workers=workers), strict=True))
        verdicts = ["right" if outcomes[program].passed else "wrong" for program in programs]
        details = [f"{outcomes[program].outcome}: {outcomes[program].detail}"[:200] for program in programs]
        grades.add({key: {"made_of": made_of[key], "verdicts": verdicts, "details": details}})
        if done is not None:
            done(len(texts))
