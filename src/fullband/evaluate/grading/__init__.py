"""Grading: GSM8K by its official rule, MATH by math-verify within time limits, HumanEval and MBPP as programs for the sandbox."""

from fullband.evaluate.grading.chat_code import fenced_code
from fullband.evaluate.grading.code_problems import (
    HUMANEVAL_STOPS,
    MBPP_STOPS,
    CodeProblem,
    humaneval_problem,
    mbpp_problem,
)
from fullband.evaluate.grading.gsm8k import GSM8KGrade, grade_gsm8k
from fullband.evaluate.grading.math_answers import MathGrader, Verdict, math_answer

__all__ = [
    "HUMANEVAL_STOPS",
    "MBPP_STOPS",
    "CodeProblem",
    "GSM8KGrade",
    "MathGrader",
    "Verdict",
    "fenced_code",
    "grade_gsm8k",
    "humaneval_problem",
    "math_answer",
    "mbpp_problem",
]
