"""Answers of MATH: found in what a model wrote, and compared, as text, as shapes, and their values by math-verify, each within a time
limit that holds."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, get_args

from fullband.evaluate.grading.chat_code import after_thinking
from fullband.evaluate.grading.math_notation import notation
from fullband.evaluate.grading.math_shape import shapes

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_UNBRACED = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?|\\[A-Za-z]+(?:\{[^{}]{0,200}\})*|[^\s$\\{}]")  # \boxed 12 is meant to be 12
_BETWEEN_BOXES = re.compile(
    r"[\s$\\()]*(?:,|;|&|\\text\{ ?(?:and|or) ?\}|(?:, ?)?\b(?:and|or)\b)[\s$\\()]*"
    r"(?:[A-Za-z](?:_\{?\w\}?)? ?= ?)?"  # the next name: x = [3], y = [5]
)
_FINAL = re.compile(r"final answer is:?\s{0,20}(?:\*\*)?\s{0,20}", re.IGNORECASE)
_FINAL_END = re.compile(r"I hope it is correct|\n|(?<=[^A-Z])\. +(?=[A-Z])", re.IGNORECASE)
_DISPLAY = {"$$": "$$", "\\[": "\\]"}
Verdict = Literal["right", "wrong", "undecided"]
_WORKER = Path(__file__).parent / "math_worker.py"
LONGEST = 2_000  # characters of an answer that is compared; references have 60


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


def same_text(reference: str, answer: str) -> bool:
    """The same text in one notation, spaces between numbers apart."""
    gold, guess = (re.sub(r"(?<!\d) | (?!\d)", "", notation(text)) for text in (reference, answer))
    return gold == guess


class MathGrader:
    """Compares answers in `workers` processes; use it as a context manager. An answer that takes more than `seconds` is undecided, and its
    process is replaced.

    Raises ValueError without math-verify, or for limits that mean nothing.
    """

    def __init__(self, *, workers: int = 1, seconds: float = 10.0):
        if workers < 1 or not seconds > 0:
            raise ValueError(f"a grader has at least 1 worker and a limit above 0 seconds, not {workers} and {seconds}")
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("grading MATH needs the package math-verify: pip install 'fullband[evaluate]'")
        self.seconds = seconds
        self.workers = [_Worker() for _ in range(workers)]
        self.idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)

    def __enter__(self) -> MathGrader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self.workers:
            worker.stop()

    def grade(self, reference: str, answer: str | None) -> Verdict:
        """Is this answer the reference? No answer is a wrong one. Safe to call from several threads."""
        if answer is None or not answer.strip():
            return "wrong"
        if len(answer) > LONGEST:
            return "undecided"
        gold, guess = shapes(reference, answer)
        if gold == guess or same_text(reference, answer):
            return "right"
        worker = self.idle.get()
        try:
            return worker.compare(asdict(gold), asdict(guess), self.seconds)
        finally:
            self.idle.put(worker)

    def grade_all(self, reference: str, answers: Sequence[str | None]) -> list[Verdict]:
        """Verdicts on these answers, in their order."""
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(partial(self.grade, reference), answers))


class _Worker:
    """One process, started when first needed and again after it was killed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def compare(self, gold: dict[str, Any], guess: dict[str, Any], seconds: float) -> Verdict:
        process = self._running()
        assert process.stdin and process.stdout
        clock = threading.Timer(seconds, process.kill)
        clock.start()
        try:
            print(json.dumps([gold, guess]), file=process.stdin, flush=True)
            reply = process.stdout.readline().strip()
        except OSError:  # killed, by the clock or by its memory limit
            reply = ""
        finally:
            clock.cancel()
        for verdict in get_args(Verdict):
            if reply == verdict:
                return verdict
        self.stop()
        return "undecided"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _running(self) -> subprocess.Popen[str]:
        """A process that has loaded everything. Raises RuntimeError if it can't be started."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            self.process = subprocess.Popen([sys.executable, "-P", str(_WORKER)], stdin=pipe, stdout=pipe, stderr=null, encoding="utf-8")
            assert self.process.stdout
            if self.process.stdout.readline().strip() != "ready":
                self.stop()
                raise RuntimeError(f"math-verify could not be started: run {sys.executable} {_WORKER} to see why")
        return self.process
