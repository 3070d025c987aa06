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

_WORDS = re.compile(r"(?:\\(?:text|textbf|mathrm|mbox)\{[^{}]*\}|[\w\s.,'()-])*")
MEMORY = 4 << 30  # bytes of address space: 9^9^9^9 must not take the machine with it


def compare(reference: str, answer: str) -> str:
    """right, wrong, or undecided if the reference is neither words nor anything that math-verify can read, or if comparing fails."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    reading = [LatexExtractionConfig(), ExprExtractionConfig()]
    try:
        gold, guess = (
            parse(f"${text.strip('$')}$", extraction_config=reading, parsing_timeout=None, raise_on_error=True)
            for text in (reference, answer)
        )
        if verify(gold, guess, timeout_seconds=None, raise_on_error=True):
            return "wrong" if _of_other_size(gold[0], guess[0]) else "right"
        readable = any(not isinstance(found, str) for found in gold)
        return "wrong" if readable or _WORDS.fullmatch(reference) else "undecided"
    except Exception:  # sympy raises of every kind, RecursionError and MemoryError among them
        return "undecided"


def _of_other_size(gold: object, guess: object) -> bool:
    """Are these two numbers whose ratio is not 1? math-verify compares to so many digits behind the point, and finds tiny numbers equal."""
    from sympy import Expr

    if not (isinstance(gold, Expr) and isinstance(guess, Expr) and gold.is_number and guess.is_number):
        return False
    size = abs(guess.evalf())
    return bool(0 < size < 1e-4) and bool(abs((gold / guess).evalf() - 1) > 1e-4)


def main() -> None:
    logging.disable()
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # nothing a library prints is taken for a reply
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has such a limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    compare("1", "1")  # load everything before the clock runs
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        print(compare(*json.loads(line)), file=replies, flush=True)


if __name__ == "__main__":
    main()
