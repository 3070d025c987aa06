"""GSM8K answers by the official rule: the number after `####`, compared as text. With lm-eval's two ways to find it in a model's text."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal

from fullband.evaluate.grading.chat_code import after_thinking
from fullband.evaluate.grading.math_text import math_answer

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_SIGN = r"(?:(?<![\w)\].$])-[ ]?)?"  # the dash of 7-18 is none
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+"
_VALUE = rf"{_SIGN}(?:\$[ ]?-?)?(?:{_DIGITS})"
_ANY_VALUE = re.compile(_VALUE)
_MARKED_VALUE = re.compile(rf"####[ \t*:=$]*({_VALUE})(?!\.[ \t]+[A-Za-z])")  # "#### 1. Add them" is a heading
_DASHES = str.maketrans({"−": "-", "–": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-"})


@dataclass(frozen=True)
class GSM8KGrade:
    """strict: the number after the first `####` is right, as text. flexible: the last number in the text is, as text.
    chat: the number after the last `####`, in the last box, or without them the last number, has the right value."""

    strict: bool
    flexible: bool
    chat: bool


def reference_answer(solution: str) -> str:
    """The number that ends a solution of the data set. Raises ValueError if it has none."""
    found = _MARKED.search(solution)
    if found is None:
        raise ValueError(f"GSM8K: no '#### number' in the reference solution {solution[-60:]!r}")
    return _plain(found[1])


def strict_answer(text: str) -> str | None:
    found = _MARKED.search(text)
    return None if found is None else _plain(found[1])


def flexible_answer(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def chat_value(text: str) -> Decimal | None:
    """The number a chat answer gives, thoughts aside: behind `####`, in its box or behind "final answer is", else its last one.
    "$1,234.00", "−18" and "18..." are numbers, "..." is none."""
    text = unicodedata.normalize("NFKC", after_thinking(text).translate(_DASHES).replace("…", " ")).translate(_DASHES)
    text = text.replace("{,}", ",").replace("\\$", "$")
    said = math_answer(text) or ""
    text = text.replace("\\boxed{", " ")
    found = _MARKED_VALUE.findall(text) or _ANY_VALUE.findall(said) or _ANY_VALUE.findall(text)
    if not found:
        return None
    return Decimal(re.sub(r"[^0-9.-]", "", found[-1])[:1000])


def grade_gsm8k(solution: str, text: str) -> GSM8KGrade:
    """Grade a model's text against a solution of the data set. Raises ValueError if that has no answer."""
    reference = reference_answer(solution)
    return GSM8KGrade(strict_answer(text) == reference, flexible_answer(text) == reference, chat_value(text) == Decimal(reference))


def _plain(number: str) -> str:
    """Without thousands separators, currency and the full stop of a sentence."""
    return number.replace(",", "").replace("$", "").removesuffix(".")
