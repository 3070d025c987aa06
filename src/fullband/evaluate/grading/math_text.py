"""Answers of MATH, found in what a model wrote."""

from __future__ import annotations

import re

from fullband.evaluate.grading.chat_code import after_thinking

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_UNBRACED = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?|\\[A-Za-z]+(?:\{[^{}]{0,200}\})*|[^\s$\\{}]")  # \boxed 12 is meant to be 12
_BETWEEN_BOXES = re.compile(
    r"[\s$\\()]*(?:,|;|&|\\text\{ ?(?:and|or) ?\}|(?:, ?)?\b(?:and|or)\b)[\s$\\()]*"
    r"(?:[A-Za-z](?:_\{?\w\}?)? ?= ?)?"  # the next name: x = [3], y = [5]
)
_FINAL = re.compile(r"final answer is:?\s{0,20}(?:\*\*)?\s{0,20}", re.IGNORECASE)
_FINAL_END = re.compile(r"I hope it is correct|\n|(?<=[^A-Z])\. +(?=[A-Z])", re.IGNORECASE)
_DISPLAY = {"$$": "$$", "\\[": "\\]"}


def math_answer(text: str) -> str | None:
    """The answer in a model's text, thoughts aside: what its last \\boxed holds (its last ones, if only commas or "and" stand between
    them), else what follows its last "final answer is". None without either, or if the last box is cut off. Linear in the text."""
    text = after_thinking(text)
    boxes = _boxes(text)
    if boxes:
        last = [boxes[-1]]
        for box in reversed(boxes[:-1]):
            between = text[box[1] : last[0][0]]
            if len(between) > 40 or not _BETWEEN_BOXES.fullmatch(between):
                break
            last.insert(0, box)
        held = [what for _, _, what in last]
        return None if None in held else ", ".join(dict.fromkeys(filter(None, held))) or None
    said = [found.end() for found in _FINAL.finditer(text)]
    return _said(text[said[-1] :]) if said else None


def _said(rest: str) -> str | None:
    opening = rest[:2]
    end = rest.find(_DISPLAY[opening], 2) if opening in _DISPLAY else -1  # a displayed formula may have several lines
    if end < 0:
        found = _FINAL_END.search(rest)
        end, opening = found.start() if found else len(rest), ""
    return rest[len(opening) : end].strip(" \t\r\n*$").removesuffix(".").strip(" *$") or None


def _boxes(text: str) -> list[tuple[int, int, str | None]]:
    """Start, end and content of the boxes that stand in no other; None is the content of one that is cut off."""
    found: list[tuple[int, int, str | None]] = []
    at = 0
    while box := _BOX.search(text, at):
        begin = box.end()
        while begin < len(text) and text[begin].isspace():
            begin += 1
        if text[begin : begin + 1] == "{":
            end = closing_brace(text, begin)
            found.append((box.start(), len(text) if end is None else end + 1, None if end is None else text[begin + 1 : end].strip()))
        else:
            word = _UNBRACED.match(text, begin)
            found.append((box.start(), word.end() if word else begin, word[0] if word else None))
        at = found[-1][1]
    return found


def closing_brace(text: str, begin: int) -> int | None:
    """Where the brace that opens at `begin` closes; escaped braces (\\{, but not the brace of \\\\{) are text."""
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None
