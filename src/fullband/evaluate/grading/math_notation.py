"""One notation for answers of MATH: signs, sizes, faces, spaces, arguments and numbers, before anything is compared.

Every rule says the same thing in other letters. What changes a value, a bracket or an order is no rule of notation.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu", "π": "pi", "ρ": "rho",
    "σ": "sigma", "τ": "tau", "φ": "phi", "ω": "omega", "Δ": "Delta", "Ω": "Omega",
}  # fmt: skip
_CHARACTERS = str.maketrans({
    **dict.fromkeys("−–—‐‑‒―﹣－", "-"), "⁄": "/", "∕": "/", "÷": "/", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*",
    "±": r"\pm ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "⌀": r"\emptyset ", "≤": r"\le ", "⩽": r"\le ",
    "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "°": r"^\circ ", "º": r"^\circ ", "∈": r"\in ", "⟨": r"\langle ",
    "⟩": r"\rangle ", "ℝ": r"\mathbb{R}", "…": "...", "′": "'", "“": "", "”": "", "\u200b": "",
    **{letter: rf"\{name} " for letter, name in _GREEK.items()},
    **{letter: f"^{{{digit}}}" for letter, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ", "0123456789n", strict=True)},
    **{letter: f"_{{{digit}}}" for digit, letter in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **{letter: f" {unicodedata.normalize('NFKC', letter).replace(chr(0x2044), '/')}" for letter in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒"},
})  # fmt: skip
_END = r"(?![A-Za-z])"  # of a command
_START = r"(?<![\\A-Za-z])"  # of a word that is no command
_SAME_SIGN = {  # commands, and what is written for them
    "dfrac|tfrac|cfrac": r"\frac", "leqslant|leqq|leq": r"\le ", "geqslant|geqq|geq": r"\ge ", "neq": r"\ne ", "lt": "<", "gt": ">",
    "equiv": "=", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "langle|lparen": "(", "rangle|rparen": ")",
    "lvert|rvert|vert|mid": "|", "varnothing": r"\emptyset ", "ldots|cdots|dots": "...", "degree": "°", "qquad|quad": " ",
    "varphi": r"\phi ", "varepsilon": r"\epsilon ", "bf|it|rm|sf|bfseries|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge": "",
    "left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits": "", "mathbf|mathit|mathsf|boldsymbol|bm|underline|boxed|fbox": "",
}  # fmt: skip
_MAGNITUDES = {"hundred": "100", "thousand": "1000", "million": "10^{6}", "billion": "10^{9}", "trillion": "10^{12}", "dozen": "12"}
_NOTATION: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    # around the answer, and marks of markdown and of formulas
    (r"(?i)^ *(?:the )?(?:final )?answer(?: is)?:? (?!is|=)", ""),
    (r" *\\pmod *(?:\{\d+\}|\d+) *$", ""),
    (r"(?<!\\)\\[()\[\]]|`", " "),
    (r"\*\*(?!\w)|^\*\*", ""),
    # thousands as TeX writes them, before spaces go; faces
    (r"(?<=\d)(?:\{,\}|,\s*\\!|\\,|,?\\ )(?=\s*\d{3}(?!\d))\s*", ""),
    (r"\\!", ""),
    (r"\\(?:text)?color ?\{[^{}]*\}", ""),
    (r"(?<!\\)\\[,;:> ]|~", " "),
    (r"\\(?:left|right)\s*\.", ""),
    (rf"\\(?:textbf|textit|textrm|texttt|textsf|emph|mathrm|mbox|hbox){_END}\s*", r"\\text"),
    (r"\\operatorname\*?\s*\{([a-z]+)\}", r"\\\1 "),
    # other names of the same sign
    *[(rf"\\(?:{commands}){_END}", written.replace("\\", r"\\")) for commands, written in _SAME_SIGN.items()],
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"!=", r"\\ne "),
    (r"\*\*", "^"),
    (r"\+/?-", r"\\pm "),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (r"\\(?:bar|dot)\s*(?=\{?\d)", r"\\overline"),
    (rf"\\text\{{\s*(?:and|or)\s*\}}|,?{_START}(?:and|or){_END}", ","),
    (rf"{_START}(sqrt|sin|cos|tan|cot|sec|csc|ln|log|pi|theta|infty){_END}", r"\\\1 "),
    (rf"{_START}infinity{_END}", r"\\infty "),
    (rf"\s*(?:\\text\{{\s*percent\s*\}}|{_START}percent{_END}|\\?%)", "%"),
    # arguments without their braces
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
    (rf"\{{([^{{}}]*)\\over{_END}([^{{}}]*)\}}", r"\\frac{\1}{\2}"),
    (rf"\{{([^{{}}]*)\\choose{_END}([^{{}}]*)\}}", r"\\binom{\1}{\2}"),
    (r"(?:√|\\sqrt\s)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"√\s*(\d+|\w)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d)", r"\\sqrt\1{\2}"),
    (r"\^\s*(-?\d+(?:\.\d+)?|-?\.\d+)", r"^{\1}"),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"_\{(\w)\}", r"_\1"),
    (r"\\log_(\d+) ", r"\\log_{\1}"),
    # degrees: an angle's unit, and a number in a function
    (rf"\^\s*\{{\s*\\circ\s*\}}|\^\s*\\circ{_END}", "°"),
    (r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d+(?:\.\d+)?)\s*°\s*[)}]?", r"\\\1(\\frac{\2\\pi}{180})"),
    (r"° *$", r"\\text{degree}"),
    (r"°", ""),
    (r"\s+", " "),
    # numbers: 2 million, 12 345, 1.5e3, 1 1/4, 0.1\overline{6}, 0.333...
    *[(rf"(?<=\d) *(?:\\text *\{{ *)?{word}s?{_END}(?: *\}})?", rf"\\cdot {size} ") for word, size in _MAGNITUDES.items()],
    (r"(?<![\d.])(?<!\d[,])(\d{1,3}(?: \d{3})+)(?![\d ]*[\d/])", lambda found: found[1].replace(" ", "")),
    (r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d+)(?!\w)", r"\1\\cdot 10^{\2}"),
    (r"(?<![\w.)}^_/])(\d+)(?: ?\\frac *\{ *(\d+) *\} *\{ *(\d+) *\}| (\d+) ?/ ?(\d+)(?![\d!]))", lambda found: _mixed(found)),
    (r"(?<![\d.])(\d*)\.(\d*)\\overline *\{? *(\d+) *\}?", lambda found: _repeating(found[1], found[2], found[3])),
    (r"(?<![\d.])(\d*)\.(\d*?)(\d{1,9}?)\3\3+\.\.\.", lambda found: _repeating(found[1], found[2], found[3])),
]  # fmt: skip
_RULES: list[tuple[re.Pattern[str], Any]] = [(re.compile(pattern), written) for pattern, written in _NOTATION]
_GROUPED = re.compile(r"(?<![\d.])(?<!\d,)\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_BRACKETS = re.compile(r"[(\[]|\\\{")


def notation(answer: str) -> str:
    """An answer in one notation."""
    text = unicodedata.normalize("NFKC", answer.translate(_CHARACTERS)).translate(_CHARACTERS)
    text = "".join(str(unicodedata.decimal(letter)) if letter.isdecimal() else letter for letter in text)
    text = re.sub(r"\s+", " ", re.sub(r"(?<!\\)\$", "", text))  # first, or the rules' spaces take quadratic time
    for pattern, written in _RULES:
        text = pattern.sub(written, text)
    if not _BRACKETS.search(text):  # (1,234) is a pair
        text = _GROUPED.sub(lambda found: found[0].replace(",", ""), text)
    return text.strip(" *").rstrip(".,;: ").lstrip("=+ ").removeprefix(r"\approx").strip()


def _mixed(found: re.Match[str]) -> str:
    """1 1/4 and 1\\frac{1}{4} as the sum they are. 2\\frac{7}{3} is a product."""
    whole, top, bottom = found[1], found[2] or found[4], found[3] or found[5]
    return rf"({whole}+\frac{{{top}}}{{{bottom}}})" if int(top) < int(bottom) else found[0]


def _repeating(whole: str, fixed: str, repeated: str) -> str:
    """The fraction that a repeating decimal is."""
    value = Fraction(int(f"{whole}{fixed}{repeated}") - int(f"0{whole}{fixed}"), int("9" * len(repeated) + "0" * len(fixed)))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
