"""GSM8K answers by the official rule: the number after `####`, compared as text. With lm-eval's two ways to find it in a model's text."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from fullband.evaluate.grading.chat_code import after_thinking
from fullband.evaluate.grading.math_answers import math_answer

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_SIGN = r"(?:(?<![\w)\].$])-[ ]?)?"  # the dash of 7-18 is none
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+"
_VALUE = rf"{_SIGN}(?:\$[ ]?-?)?(?:{_DIGITS})"
_OVER = r"(?: ?/ ?[0-9]{1,9}(?![0-9/]))?"
_ANY_VALUE = re.compile(_VALUE)
_FRACTION_OR_VALUE = re.compile(_VALUE + _OVER)
_MARKED_VALUE = re.compile(rf"####[ \t*:=$]*({_VALUE}{_OVER})(?!\.[ \t]+[A-Za-z])")  # "#### 1. Add them" is a heading
_MARKED_EQUATION = re.compile(rf"####(?:[-+*/×÷x().,:$\d \t%=]|of )*=[ \t*]*({_VALUE})(?![.,]?\d|[ \t]*[-+*/×÷x][ \t]*[$\d])")  # 6 * 7 = 42
_HALVES = {"½": ".5", "¼": ".25", "¾": ".75"}
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!:; ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z}])(?:\^ ?(?:\{\d\}|\d)|[²³])|(?<=\b[cdkm]m)[23]\b|(?<=\bm)[23]\b")  # cm², m^2, \text{m}^{2}
_FRACTION = re.compile(r"\\[dt]?frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}")
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
    found = strict_answer(solution)
    if found is None:
        raise ValueError(f"GSM8K: no '#### number' in the reference solution {solution[-60:]!r}")
    return found


def strict_answer(text: str) -> str | None:
    found = _MARKED.search(text)
    return None if found is None else _plain(found[1])


def flexible_answer(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def chat_value(text: str) -> Fraction | None:
    """The number a chat answer gives, thoughts aside: after `####`, in its box or after "final answer is", else its last one.
    "$1,234.00", "−18", "18..." and "18 cm²" are numbers, "..." is none; after a mark "1/2" is one, and "6 * 7 = 42" is 42."""
    text = _THOUSANDS.sub(",", _UNIT_POWER.sub(" ", after_thinking(text).translate(_DASHES).replace("…", " ")))
    text = "".join(_HALVES.get(letter, letter) for letter in text)
    text = unicodedata.normalize("NFKC", text).translate(_DASHES).replace("\\$", "$")
    said = _FRACTION.sub(r"\1/\2", math_answer(text) or "")
    text = _FRACTION.sub(r"\1/\2", text.replace("\\boxed{", " "))
    marked = [*_MARKED_EQUATION.finditer(text), *_MARKED_VALUE.finditer(text)]
    last = max(marked, key=lambda found: found.start(), default=None)  # an equation, where both begin alike
    found = [last[1]] if last else _FRACTION_OR_VALUE.findall(said) or _ANY_VALUE.findall(text)
    if not found:
        return None
    above, _, below = re.sub(r"[^0-9./-]", "", found[-1])[:1000].partition("/")
    return Fraction(above) / int(below or 1) if below.strip("0") or not below else None


def grade_gsm8k(solution: str, text: str) -> GSM8KGrade:
    """Grade a model's text against a solution of the data set. Raises ValueError if that has no answer."""
    reference = reference_answer(solution)
    return GSM8KGrade(strict_answer(text) == reference, flexible_answer(text) == reference, chat_value(text) == Fraction(reference))


def _plain(number: str) -> str:
    """Without thousands separators, currency and the full stop of a sentence."""
    return number.replace(",", "").replace("$", "").removesuffix(".")
