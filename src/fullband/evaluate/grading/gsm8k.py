"""GSM8K answers by the official rule: the number after `####`, compared as text. With lm-eval's two ways to find it in a model's text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


@dataclass(frozen=True)
class GSM8KGrade:
    """strict: the number after the first `####` is right. flexible: the last number in the text is."""

    strict: bool
    flexible: bool


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


def grade_gsm8k(solution: str, text: str) -> GSM8KGrade:
    """Grade a model's text against a solution of the data set. Raises ValueError if that has no answer."""
    reference = reference_answer(solution)
    return GSM8KGrade(strict_answer(text) == reference, flexible_answer(text) == reference)


def _plain(number: str) -> str:
    """Without thousands separators, currency and the full stop of a sentence."""
    return number.replace(",", "").replace("$", "").removesuffix(".")
