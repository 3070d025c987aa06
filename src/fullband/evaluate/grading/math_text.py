"""Answers of MATH as text: found in what a model wrote, put into one notation, and judged where math-verify has no rule or a wrong one."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from fullband.evaluate.grading.chat_code import after_thinking

LONGEST = 5_000  # characters of an answer
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_FINAL = re.compile(r"final answer is:?", re.IGNORECASE)
_FINAL_END = re.compile(r"I hope it is correct|\n", re.IGNORECASE)
_CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "±": r"\pm ", "π": r"\pi ",
    "∞": r"\infty ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "∈": r"\in ",
    "√": r"\sqrt ", "²": "^2", "³": "^3",
})  # fmt: skip
_NOTATION = [  # the same thing in other letters: pattern, what is written for it
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:leqslant|leq)(?![A-Za-z])", r"\\le "),
    (r"\\(?:geqslant|geq)(?![A-Za-z])", r"\\ge "),
    (r"\\(?:lbrace|\{)(?![A-Za-z])", r"\\{"),
    (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
    (r"\\(?:varnothing|emptyset)(?![A-Za-z])", r"\\emptyset "),
    (r"(?<!\\),\s*\\!\s*(?=\d{3})", ""),
    (r"(?<!\\)\\[,;:! ]|\\q?quad(?![A-Za-z])|~", " "),
    (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", ""),
    (r"\\?\$", ""),
    (r"\\?%", ""),  # the answer is how many percent
    (r"(?<=\d)\{,\}(?=\d)", ","),
]
_RULES = [(re.compile(pattern), written) for pattern, written in _NOTATION]
_UPRIGHT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\s+")
_BASE = re.compile(r"^\(?([0-9A-Za-z]+)\)?_\{?(\d+)\}?$")
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\{?(\d+)\}?")
_MIXED = re.compile(r"(?<![\d.)}^_/])(-?)(\d+) +(\d+) ?/ ?(\d+)(?![\d/])")
_MIXED_FRACTION = re.compile(r"^(-?)(\d+)\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))$")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")
_BOUNDS = re.compile(r"^(.+?)(\\le|<)(?![A-Za-z])\s*[a-zA-Z]\s*(\\le|<)(?![A-Za-z])(.+)$")
_FACTORIAL_PART = re.compile(r"(?<![\w.}])(\d+) ?/ ?(\d+)!")
_DEGREES = re.compile(r"\\(sin|cos|tan|cot|sec|csc)\s*\(?\{?\s*(\d+(?:\.\d+)?)\s*(?:\^\s*\\circ|\^\s*\{\s*\\circ\s*\}|°)\s*\}?\)?")
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_UNITS = re.compile(r"^(-?[\d.,/]+) +(?:[A-Za-z]{3,}|cm|mm|km|ft|kg|mi|in)(?: +[A-Za-z]+){0,3}$")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_NUMBER = re.compile(r"-?[\d.,\s]*")
_WORD = re.compile(r"[A-Za-z][A-Za-z .'-]*")


def math_answer(text: str) -> str | None:
    """The answer in a model's text, thoughts aside: what its last \\boxed holds, or its last boxes if they stand side by side; else what
    follows its last "final answer is". None without either. Linear in the text."""
    text = after_thinking(text)
    boxes = _boxes(text)
    if boxes is not None:
        return boxes
    said = list(_FINAL.finditer(text))
    if not said:
        return None
    rest = text[said[-1].end() :].lstrip()
    end = _FINAL_END.search(rest)
    return rest[: end.start() if end else len(rest)].strip().strip("*").removesuffix(".").strip("*").strip("$").strip() or None


def _boxes(text: str) -> str | None:
    """What the last boxes hold, those between which only commas, dollars and "and" stand joined by commas. None if the last is cut off."""
    found: list[tuple[int, int, str]] = []
    at = 0
    while (box := _BOX.search(text, at)) is not None:
        at = box.end()
        begin = at + len(text[at : at + 50]) - len(text[at : at + 50].lstrip())
        if begin >= len(text):
            found.append((box.start(), at, ""))
        elif text[begin] != "{":
            word = re.compile(r"\\?[0-9]|\\[A-Za-z]+|[^\s$]").match(text, begin)
            at = word.end() if word else begin + 1
            found.append((box.start(), at, text[begin:at]))
        else:
            end = _closing(text, begin)
            if end is None:
                found.append((box.start(), len(text), ""))
                break
            found.append((box.start(), end + 1, text[begin + 1 : end].strip()))
            at = end + 1
    if not found:
        return None
    last = found[-1:]
    for one in reversed(found[:-1]):
        between = text[one[1] : last[0][0]]
        if len(between) > 30 or not re.fullmatch(r"[\s$]*(?:(?:,|and|,\s*and|\\text\{ ?(?:and|or) ?\}|or)[\s$]*)", between):
            break
        last.insert(0, one)
    held = [one[2] for one in last]
    return ", ".join(dict.fromkeys(held)) if all(held) else None


def _closing(text: str, begin: int) -> int | None:
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def normal(answer: str) -> str:
    """An answer in the notation math-verify understands best."""
    text = unicodedata.normalize("NFKC", answer.translate(_CHARACTERS)).translate(_CHARACTERS).strip().strip("*").strip()
    text = _DEGREES.sub(r"\\\1(\\frac{\2\\pi}{180})", text)
    for pattern, written in _RULES:
        text = pattern.sub(written, text)
    text = _GROUPED.sub(lambda found: found[0].replace(",", ""), text) if not re.search(r"[(\[{]", text) else text
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _MIXED.sub(r"\1(\2+\\frac{\3}{\4})", text)
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    text = _FACTORIAL_PART.sub(r"\\frac{\1}{\2!}", text)
    text = _UNITS.sub(r"\1", text.strip().rstrip(".").strip())
    if not _NUMBER.fullmatch(text) and "\\text" not in text:  # within an expression a decimal is exact
        text = _DECIMAL.sub(lambda found: rf"\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}", text)
    bounds = _BOUNDS.match(text.strip())
    if bounds:
        low, left, right, high = bounds.groups()
        text = f"{'[' if left != '<' else '('}{low},{high}{']' if right != '<' else ')'}"
    return text.strip().rstrip(".;,").strip()


def _fraction_of_repeating(found: re.Match[str]) -> str:
    sign, whole, fixed, repeated = found.groups()
    top = int(f"{whole}{fixed}{repeated}") - int(f"0{whole}{fixed}")
    return rf"{sign}\frac{{{top}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def same_text(reference: str, answer: str) -> bool:
    """Equal up to spacing, upright words, delimiters' sizes, fraction styles and the dollar and degree signs."""
    return _plain(reference) == _plain(answer)


def _plain(answer: str) -> str:
    return _SPACES.sub("", _UPRIGHT.sub(r"\1", normal(answer))).rstrip(".")


def _parts(text: str) -> list[str]:
    """Members of a list at its top level."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part.strip() for part in [*parts, text[start:]]]


def by_rule(reference: str, answer: str) -> Literal["right", "wrong"] | None:
    """The verdict where the text alone decides it; None leaves it to math-verify."""
    if same_text(reference, answer):
        return "right"
    gold, guess = _plain(reference), _plain(answer)
    if "?" in guess and "?" not in gold:
        return "wrong"  # a question is no answer; math-verify drops what it can't understand
    bases = [_BASE.match(text) for text in (gold, guess)]
    if all(bases):
        return "right" if bases[0].groups() == bases[1].groups() else "wrong"  # type: ignore[union-attr]  # math-verify ignores the base
    if (r"\pm" in gold) != (r"\pm" in guess) and len(_parts(gold)) == len(_parts(guess)) == 1 and not gold.startswith(r"\{"):
        return "wrong"  # two values are not one
    if (gold.startswith(r"\{")) != (guess.startswith(r"\{")) and {gold[:1], guess[:1]} & {"(", "["}:
        return "wrong"  # a set is no tuple and no interval
    members, given = _parts(gold), _parts(guess)
    if len(members) != len(given) and r"\pm" not in gold + guess and r"\cup" not in gold + guess:
        bare = [text for text in (gold, guess) if len(_parts(text)) > 1]
        if not any(text.startswith(r"\{") for text in (gold, guess)) and not any("=" in text for text in bare):
            return "wrong"  # 4 is not 4,4
    mixed = [_MIXED_FRACTION.match(text) for text in (gold, guess)]
    if any(mixed) and not all(mixed) and re.fullmatch(r"-?\d+", guess if mixed[0] else gold):
        return "wrong"  # 2 2/3 is not 2
    if _WORD.fullmatch(gold) and _WORD.fullmatch(guess) and len(gold) > 2 and gold.casefold() == guess.casefold():
        return "right"
    return None
