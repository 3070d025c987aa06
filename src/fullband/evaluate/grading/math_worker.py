"""The process that compares mathematical answers: one JSON line in, one out. It runs as a script, so that it can be killed at any moment
and loads nothing but math-verify.

Comparing can take for ever (a simplification, a power of a power), and math-verify's own limits are signals, which a long computation in C
does not see. So it has none here; the process that asked keeps the time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

MEMORY = 4 << 30  # bytes of address space: 9^9^9^9 must not take the machine with it
_UNORDERED = ("list", "set", "union")
_DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d+)(?![\d.])|(?<![\w.])(\d+)\.(?![\d.])")
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
_FOREIGN = re.compile(r"[?#@\"$;]|\d \d|\.\.")  # no value holds these
_DIGITS = 6  # a decimal stands for a number without an end if it has so many digits


class Unreadable(ValueError):
    """The reference is nothing that math-verify can parse."""


def compare(gold: dict[str, Any], guess: dict[str, Any]) -> str:
    """right, wrong, or undecided if math-verify can't parse the reference, or if comparing fails. Both are shapes (math_shape.Shape)."""
    try:
        return "right" if same(gold, guess) else "wrong"
    except Exception:  # sympy raises of every kind, RecursionError and MemoryError among them
        return "undecided"


def same(gold: dict[str, Any], guess: dict[str, Any]) -> bool:
    """Are these two the same answer? Raises Unreadable, and what sympy raises."""
    if gold["name"] and guess["name"] and gold["name"] != guess["name"]:
        equations = gold["equation"], guess["equation"]  # y = 1/x and x = 1/y
        return None not in equations and same_value(*equations)
    if any(g != a for g, a in zip((gold["unit"] or "").split("/"), (guess["unit"] or "").split("/"), strict=False) if g and a):
        return False  # 10 cm is not 10 m, but it is 10
    if gold["name"] and not guess["name"] and re.search(r"[-+*/^|]", gold["name"].replace("^-1(", "(")):
        return False  # x^2 + y^2 = 1 is a circle
    kinds = gold["kind"], guess["kind"]
    if "chain" in kinds:
        return all(same(g, a) for g in (gold["parts"] or [gold]) for a in (guess["parts"] or [guess]))
    if "words" in kinds:
        return kinds == ("words", "words") and gold["text"] == guess["text"]
    if "base" in kinds:
        return same_in_base(gold, guess)
    if kinds == ("value", "value"):
        if guess["percent"] and not gold["percent"] and same_value(gold["text"], rf"\frac{{{guess['text']}}}{{100}}"):
            return True
        return same_value(gold["text"], guess["text"])
    if gold["kind"] in _UNORDERED and guess["kind"] in _UNORDERED:
        return same_members(gold["parts"], guess["parts"]) or ("union" in kinds and same_value(gold["text"], guess["text"]))
    if gold["kind"] == guess["kind"] or {*kinds} == {"()", "list"}:  # a pair without its brackets is still a pair
        return same_in_order(gold["parts"], guess["parts"])
    return "union" in kinds and same_value(gold["text"], guess["text"])


def same_in_order(gold: Sequence[dict[str, Any]], guess: Sequence[dict[str, Any]]) -> bool:
    return len(gold) == len(guess) and all(map(same, gold, guess))


def same_members(gold: Sequence[dict[str, Any]], guess: Sequence[dict[str, Any]]) -> bool:
    """The same members in any order; in this order if one side gives values to several names and the other says none."""
    if len(gold) != len(guess):
        return False
    for named, other in ((gold, guess), (guess, gold)):
        if len({part["name"] for part in named} - {None}) > 1 and not any(part["name"] for part in other):
            return same_in_order(gold, guess)
    left = list(guess)
    for member in gold:
        found = next((at for at, other in enumerate(left) if same(member, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def same_in_base(gold: dict[str, Any], guess: dict[str, Any]) -> bool:
    """The same digits, where the reference says a base; the same value, where only the answer does."""
    if gold["kind"] == "base":
        return gold["text"] == guess["text"] or gold["text"].split("_")[0] == guess["text"].upper()
    digits, base = guess["text"].split("_")
    try:
        return guess["kind"] == "base" and same_value(gold["text"], str(int(digits, int(base))))
    except ValueError:
        return False


def same_value(gold: str, guess: str) -> bool:
    """Are these two values the same? Decimals are exact, but one with six digits stands for a number that has no end.
    Raises Unreadable, and what sympy raises."""
    if gold.replace(" ", "") == guess.replace(" ", "") and not re.search(r"\d \d", gold + guess):
        return True
    if _NUMBER.fullmatch(gold) and _NUMBER.fullmatch(guess):
        return Fraction(gold) == Fraction(guess)
    left, right = as_sympy(gold), as_sympy(guess)
    if left is None:
        raise Unreadable(gold)
    if right is None:
        return False
    numbers = number(left), number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return same_number(gold, left, guess, right)
    if numbers != (None, None):
        return False
    from math_verify import verify

    return bool(verify(left, right, timeout_seconds=None, raise_on_error=True))


def as_sympy(text: str) -> Any:
    """A value as a sympy object; None for what is none. Its decimals are fractions, and i is the imaginary unit."""
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from sympy import Basic, I

    if _FOREIGN.search(text):
        return None
    style = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False)
    try:
        found = latex2sympy(_DECIMAL.sub(_fraction, text), is_real=True, convert_degrees=False, normalization_config=style)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the parser raises Exception itself
        return None
    if not isinstance(found, Basic):
        return found  # a matrix
    return found.subs({symbol: I for symbol in found.free_symbols if getattr(symbol, "name", "") == "i"})


def _fraction(found: re.Match[str]) -> str:
    whole, digits = found[1] or found[3] or "0", found[2] or ""
    return rf"(\frac{{{int(whole + digits)}}}{{{10 ** len(digits)}}})"


def number(value: Any) -> Any:
    """This value if it is a finite number."""
    from sympy import Expr, nan, oo, zoo

    return value if isinstance(value, Expr) and value.is_number and not value.has(oo, -oo, zoo, nan) else None


def same_number(gold: str, left: Any, guess: str, right: Any) -> bool:
    """To 40 digits of their size, so that 1/2004! is not 1/2006!; or to those of a decimal."""
    from sympy import N, simplify

    a, b = N(left, 60), N(right, 60)
    difference, size = abs(N(a - b)), max(abs(N(a)), abs(N(b)))
    if difference <= size * Fraction(1, 10**40):
        return size < 10**40 or not (left.is_rational and right.is_rational) or left.doit() == right.doit()
    decimal = next((text for text in (gold, guess) if _NUMBER.fullmatch(text) and "." in text), None)
    if decimal is not None:
        digits = decimal.partition(".")[2]
        return len(decimal.lstrip("-0.").replace(".", "")) >= _DIGITS and bool(difference <= Fraction(1, 10 ** len(digits)))
    return bool(size < 1e-30) and simplify(left - right) == 0  # what is 0 may come out as 1e-60


def main() -> None:
    logging.disable()
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # nothing a library prints is taken for a reply
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has such a limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for warm_up in (("x^2+2x+1", "(x+1)^2"), (r"2\pi", "6.28")):  # load everything before the clock runs
        same_value(*warm_up)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        print(compare(*json.loads(line)), file=replies, flush=True)


if __name__ == "__main__":
    main()
