"""The shape of an answer of MATH: a value, words, a tuple, an interval, a list, a set. math-verify compares values; shapes are told apart
here, because it takes a set for a tuple, drops members, letters it takes for units and what it does not understand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fullband.evaluate.grading.math_notation import notation

_WORDS_ONLY = re.compile(r"\\text ?\{[^{}]*\}[.\s]*|[A-Za-z][a-z]{3,}(?:[ '-]+[A-Za-z]+)*|\(?[A-Za-z]\)|[A-Za-z]")
_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")
_ANY_TEXT = re.compile(r"\\(?:text[a-z]*|emph|mathrm|mbox) ?\{([^{}]*)\}")
_SPACE = re.compile(r"~|\\[,;:>! ]|\\q?quad(?![A-Za-z])")
_VALUE_IN_WORDS = re.compile(r"[-+\d.,/ ]*\d[-+\d.,/ ]*(?: *[A-Za-z]{1,12}){0,3}\.?|[A-Za-z]")  # \text{15}, \text{5 cm}
_CHOICE_AND_VALUE = re.compile(
    r"[\s$]*\\(?:text[a-z]*|mathrm|mathbf) ?\{ ?\(([A-J])\)[ :.~]*\}[\s~$\\:]*((?!\\?text|and\b|or\b|,)\S.*)", re.DOTALL
)
_LETTERS_LISTED = re.compile(r"\\text[a-z]* ?\{ ?((?:[A-Z]|\d+)(?:, ?(?:and |or )?(?:[A-Z]|\d+))+) ?\}")  # \text{A, C, D}
_FACE = re.compile(r"\\(?:mathbf|mathit|boldsymbol|bm|underline) ?\{(.*)\}", re.DOTALL)
_OPENERS, _CLOSERS = "([{", ")]}"
_RELATION = re.compile(r"<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])")
_VARIABLE = re.compile(r"[A-Za-z](?:_\w|_\{\w+\})?|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|rho|omega|sigma|tau)")
_MEMBER_OF = re.compile(r"([A-Za-z]|\\[a-z]+) *\\in(?![A-Za-z]) *")
_NO_VALUE = re.compile(r"_\{[^{}]*\}|_\w|\^\{[^{}]*\}|[A-Za-z]\([^()=]*\)")  # of a name: indices, powers, arguments
_BASE = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{? ?\(?(?:\\text\{ ?)?(\d+|[a-z]+)(?: ?\})?\)? ?\}?")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12, "sixteen": 16}
_INFINITY = r"\infty"
_DEEPEST = 50  # brackets in brackets


@dataclass(frozen=True)
class Shape:
    """One answer.

    kind    "value"; "words"; "base", a number with its base; "list", "set" and "union", whose order says nothing; two brackets ("(]")
            or ":", whose order matters; "chain", the sides of an equation between values
    text    all of it, in one notation
    parts   shapes of the members
    name    what it is the value of: x in x = 5, x > 5 and x in [5, 6]
    equation  all of x = 5
    percent, unit   what followed a value
    """

    kind: str
    text: str
    parts: tuple[Shape, ...] = ()
    name: str | None = None
    equation: str | None = None
    percent: bool = False
    unit: str | None = None


def shapes(reference: str, answer: str) -> tuple[Shape, Shape]:
    """Both as shapes, which depend on each other: 100,200 is one number, or two beside a list; m is a unit, or a letter beside letters."""
    gold = shape_of(reference, letters=True)
    if choice := _CHOICE_AND_VALUE.match(answer):  # \textbf{(C) } 5
        answer = f"({choice[1]})" if gold.kind == "words" and len(gold.text) == 1 else choice[2]
    if gold.kind == "words":
        return gold, Shape("words", canonical_words(_FACE.sub(r"\1", answer)))
    guess = shape_of(answer, letters=bool(re.search(r"(?<![\\A-Za-z])[A-Za-z]", gold.text)) or gold.kind != "value")
    if gold.kind in ("list", "set") and guess.kind == "value":
        guess = _as_list(answer) or guess
    elif guess.kind in ("list", "set") and gold.kind == "value":
        gold = _as_list(reference) or gold
    return gold, guess


def _as_list(text: str) -> Shape | None:
    plain = text.strip().strip("$ ")
    return _listed(plain.replace(",", ", "), True) if re.fullmatch(r"[\d,]+", plain) and "," in plain else None


def shape_of(answer: str, *, letters: bool) -> Shape:
    """The shape of an answer. With `letters`, a single letter after a number is a variable and no unit."""
    words = _words(answer)
    if words is not None:
        return Shape("words", words)
    text = notation(_LETTERS_LISTED.sub(r"\1", answer))
    try:
        return _listed(text, letters) if max(_depths(text), default=0) <= _DEEPEST else Shape("value", text)
    except RecursionError:
        return Shape("value", text)


def _words(answer: str) -> str | None:
    plain = answer.replace(r"\$", "").strip().strip("$*. ").replace(r"\!", "")
    plain = _FACE.sub(r"\1", plain) if _FACE.fullmatch(plain) else plain
    if _LETTERS_LISTED.fullmatch(plain):
        return None
    plain = _ANY_TEXT.sub(r"\\text{\1}", plain)
    if not _WORDS_ONLY.fullmatch(plain):
        return None
    inner = _TEXT.sub(r"\1", plain).strip()
    if _VALUE_IN_WORDS.fullmatch(inner) and (inner[0].isdigit() or inner[0] in "-+." or not plain.startswith("\\") or len(inner) > 1):
        return None
    return canonical_words(inner)


def canonical_words(text: str) -> str:
    """Words without capitals, TeX's spaces, an article, punctuation at their ends, and the brackets of a choice such as (C)."""
    plain = " ".join(_ANY_TEXT.sub(r"\1", _SPACE.sub(" ", text)).casefold().split()).strip(" .,;:!()[]{}'\"$*\\")
    return re.sub(r"^(?:an?|the) (?=[a-z]{3})(?!and\b)", "", plain)


def _listed(text: str, letters: bool) -> Shape:
    text = _unwrapped(text)
    member = _MEMBER_OF.match(text)
    if member:
        return replace(_listed(text[member.end() :], letters), name=member[1])
    head, equals, rest = text.partition("=")
    if equals and _VARIABLE.fullmatch(head.strip()) and len(_split(rest, ",;")) > 1 and "=" not in rest and not _RELATION.search(rest):
        return replace(_listed(rest.strip(), letters), name=head.strip())  # x = 2, 3
    members = [member for part in _split(text, ",;") for member in _signs(part)]
    if len(members) > 1:
        return Shape("list", text, tuple(_one(member, letters) for member in members))
    return _one(text, letters)


def _one(text: str, letters: bool) -> Shape:
    """The shape of what has no separators at its top level."""
    text = _unwrapped(text)
    if re.fullmatch(r"\\mathbb\{R\}\^ ?\{? ?\+ ?\}?", text):
        return _one(r"(0,\infty)", letters)
    if text in (r"\mathbb{R}", r"\Re", r"\text{all real numbers}"):
        return _one(r"(-\infty,\infty)", letters)
    bracketed = _bracketed(text)
    if bracketed is not None:
        kind, inside = bracketed
        members = [member for part in _split(inside, ",;") for member in (_signs(part) if kind == "set" else [part])]
        if kind == "set" and len(members) == 1 and not re.search(r"[|:]", inside):
            return _one(members[0], letters)
        if len(members) > 1:
            return Shape(kind, text, tuple(_listed(member, letters) for member in members))
    united = _split(text, "\\cup")
    if len(united) > 1:
        return Shape("union", text, tuple(_one(part, letters) for part in united))
    sides = _split(text, "=")
    if len(sides) > 1:
        return _equation(text, sides, letters)
    if r"\approx" in text:
        left, _, right = text.partition(r"\approx")
        return _listed((right if _VARIABLE.fullmatch(left.strip()) else left).strip(), letters)  # the exact side
    relations = _RELATION.findall(text)
    if relations:
        return _inequality(text, [side.strip() for side in _RELATION.split(text)], relations, letters)
    ratio = _split(text, ":")
    if len(ratio) > 1 and not re.search(r"[|{}]", text):
        return Shape(":", text, tuple(_value(part, letters) for part in ratio))
    return _value(text, letters)


def _equation(text: str, sides: list[str], letters: bool) -> Shape:
    """y = 2x + 3 gives y a value, as does A + B = 5; 5x - 7y = 0 is itself the answer; 2 + 3 = 5 is 5 if both sides are."""
    head = sides[0]
    computed = re.search(r"\d", _NO_VALUE.sub("", head)) or re.search(r"\\(?:frac|sqrt|sin|cos|tan|pi)", head)
    if re.search(r"[A-Za-z]", head) and not computed:
        return replace(_listed(sides[-1], letters), name=re.sub(r"\\text|[{} ]", "", head), equation=text)
    if not re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", text):
        return Shape("chain", text, tuple(_value(side, letters) for side in sides))
    return Shape("value", text)


def _inequality(text: str, sides: list[str], relations: list[str], letters: bool) -> Shape:
    """a < x \\le b, x > a and the like as the interval they say; others stay what they are."""
    if any(relation in (">", r"\ge") for relation in relations):
        sides, relations = sides[::-1], [{">": "<", r"\ge": r"\le"}.get(relation, "?") for relation in reversed(relations)]
    if "?" in relations or not all(sides):
        return Shape("value", text)
    variables = [at for at, side in enumerate(sides) if _VARIABLE.fullmatch(side)]
    if len(sides) == 2 and len(variables) == 1:
        at = variables[0]
        low, high = (f"-{_INFINITY}", sides[1]) if at == 0 else (sides[0], _INFINITY)
        brackets = ("(" if at == 0 or relations[0] == "<" else "[") + (")" if at == 1 or relations[0] == "<" else "]")
    elif len(sides) == 3 and variables == [1]:
        at, low, high = 1, sides[0], sides[2]
        brackets = ("(" if relations[0] == "<" else "[") + (")" if relations[1] == "<" else "]")
    else:
        return Shape("value", text)
    return Shape(brackets, text, (_value(low, letters), _value(high, letters)), name=sides[at])


_UNIT_WORD = r"(?:square|sq|cubic|cu)?\.? ?[A-Za-z]+(?:\^\{?\d\}?)?"
_TEXT_UNIT = re.compile(r"(?: ?(?:/ ?)?\\text ?\{([^{}]*)\}(?:\^\{?\d\}?)?)+$")
_BARE_UNIT = re.compile(
    r"^([^A-Za-z]*(?:\\(?:frac|sqrt|pi|cdot|text)[^A-Za-z]*)*[\d}])( ?)"  # a value without letters
    rf"({_UNIT_WORD}(?:(?: per |/| )?{_UNIT_WORD}){{0,3}})$"
)
_COUNTED = re.compile(  # 4 red marbles: a plural, and nothing that would change the value
    r"(?!.*\b(?:is|was|plus|minus|times|less|not)\b)(?:[a-z]+ )*(?:[a-z]{3,}s|people|children|men|women|way|time|votes?)(?: [a-z]+)*"
)
_SPELLINGS = {
    "dollar": "usd", "cent": "¢", "millimeter": "mm millimetre", "centimeter": "cm centimetre", "meter": "m metre",
    "kilometer": "km kilometre", "inch": "in inche", "foot": "ft feet", "yard": "yd", "mile": "mi", "second": "s sec", "minute": "min",
    "hour": "h hr", "day": "", "week": "", "month": "", "year": "yr", "gram": "g", "kilogram": "kg", "pound": "lb", "ounce": "oz",
    "degree": "deg", "radian": "rad", "liter": "l litre", "milliliter": "ml", "unit": "",
}  # fmt: skip
UNITS = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in [unit, *spellings.split()]}
UNITS |= {"mph": "mile/hour", "kph": "kilometer/hour", "kmh": "kilometer/hour"}


def _value(text: str, letters: bool) -> Shape:
    """A value without its unit, its percent sign and its currency."""
    if inner := _TEXT.fullmatch(text):
        text = inner[1].strip()
    unit = None
    if r"\$" in text or "€" in text or "£" in text:
        unit, text = "dollar" if "$" in text else None, re.sub(r"\\\$|[€£]", "", text).strip()
    after = _TEXT_UNIT.search(text)
    if after and after.start() and re.search(r"\d|\\pi", text[: after.start()]):
        unit, text = unit_of(after[1]) or unit, text[: after.start()]
    elif bare := _BARE_UNIT.match(text):
        word = re.sub(r"\^.*", "", bare[3])
        if (unit_of(word) and not (letters and len(word) < 2)) or (bare[2] and _COUNTED.fullmatch(word)):
            unit, text = unit_of(word) or unit, bare[1]
    base = _BASE.fullmatch(re.sub(r"\\text ?\{ ?([A-Fa-f]) ?\}", r"\1", text.strip()))
    if base and (base[2].isdigit() or base[2] in _BASES):
        return Shape("base", f"{base[1].upper()}_{_BASES.get(base[2], base[2])}")
    percent = text.endswith("%")
    return Shape("value", _TEXT.sub(r"\1", _unwrapped(text.rstrip("% "))) if percent else _unwrapped(text), percent=percent, unit=unit)


def unit_of(words: str) -> str | None:
    """The unit these words name, without "square" and the plural: meter, or mile/hour. None for other words."""
    found = []
    for part in re.split(r"/|\bper\b", words.casefold()):
        names = re.findall(r"[a-z¢]+", part)
        unit = next((unit for word in names if (unit := UNITS.get(word) or UNITS.get(word.removesuffix("s")))), None)
        if unit is None:
            break
        found.append(unit)
    return "/".join(found) or None


# Brackets --------------------------------------------------------------------------------------------------------------------------------


def _depths(text: str) -> list[int]:
    """How many brackets are open before each character; environments count as brackets."""
    depths, depth = [], 0
    for at, letter in enumerate(text):
        depths.append(depth)
        if letter in _OPENERS or text.startswith(r"\begin", at):
            depth += 1
        elif letter in _CLOSERS or text.startswith(r"\end", at):
            depth -= 1
            depths[at] = depth
    return depths


def _split(text: str, separators: str) -> list[str]:
    """The parts between separators (single characters, or one command) outside of all brackets, without empty ones."""
    depths = _depths(text)
    command = separators if separators.startswith("\\") else None
    parts, start = [], 0
    for at, letter in enumerate(text):
        if depths[at] == 0 and (text.startswith(command, at) if command else letter in separators):
            parts.append(text[start:at])
            start = at + len(command or letter)
    return [part.strip() for part in [*parts, text[start:]] if part.strip()] or [text.strip()]


def _signs(text: str) -> list[str]:
    """a \\pm b and a \\mp b as both of what they stand for."""
    if (r"\pm" not in text and r"\mp" not in text) or (text.startswith("\\{") and _bracketed(text)):
        return [text]
    plus, minus = text.replace(r"\pm", "+").replace(r"\mp", "-"), text.replace(r"\pm", "-").replace(r"\mp", "+")
    return [re.sub(r"(^|[=(]) *\+ *", r"\1", plus).strip(), minus]


def _bracketed(text: str) -> tuple[str, str] | None:
    """The kind and the inside of what stands in one pair of brackets as a whole."""
    opening, closing = ("\\{", "\\}") if text.startswith("\\{") else (text[:1], text[-1:])
    if opening not in ("(", "[", "\\{", "{") or closing not in (")", "]", "\\}", "}") or not text.endswith(closing) or len(text) < 3:
        return None
    depths = _depths(text)
    if any(depth == 0 for depth in depths[len(opening) : len(text) - 1]):
        return None
    return ("set" if opening.endswith("{") else opening + closing), text[len(opening) : len(text) - len(closing)]


def _unwrapped(text: str) -> str:
    """Without brackets that only group: (5), {5}."""
    text = text.strip()
    while len(text) > 2 and (text[0] + text[-1]) in ("()", "[]", "{}") and not text.endswith("\\}"):
        inside = text[1:-1]
        if len(_split(inside, ",;")) > 1 or any(depth == 0 for depth in _depths(text)[1:-1]):
            break
        text = inside.strip()
    return text
