"""Program-like text that contains the constructions of App. F: assignments and updates, and questions about the state they leave.

`completion`, `memory` and `registers` write App. F's inputs, up to the colon after which the answer stands. `ProgramText` is a source of
short programs in the same words, in which questions are asked and answered along the way, so that a small model can learn to answer them.
Document i is a pure function of (seed, i).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fullband.config import ProgramTextSource
from fullband.data.sources import START, Cursor, TextSource, held_out
from fullband.data.tasks import Split

STATUS = ("more", "done")  # answers of a completed counter that differs from the required one, and that equals it
BITS = ("zero", "one")
NUMERALS = range(10, 30)  # counts; as many tokens each in tokenizers that split digits and in those that do not
SCRATCH = range(10)
REGISTERS = 8
QUERY_UPDATES = 8  # null updates between the last assignment and the query of a register


def null_updates(count: int) -> str:
    """Updates that change nothing."""
    return "scratch += 0\n" * count


def completion(required: int, completed: int, scratch: int, updates: int, remark: str = "") -> str:
    """App. F, completion tracking: is the completed count the required one? `remark`: the answer, in text to train on."""
    return f"required = {required}\ncompleted = {completed}{remark}\nscratch = {scratch}\n{null_updates(updates)}Status:"


def memory(state: int, scratch: int, operations: Sequence[int], updates: int) -> str:
    """App. F, delayed memory: what was the state, before operations on something else?"""
    operated = "".join(f"scratch ^= {bit}\n" for bit in operations)
    return f"state = {state}\nscratch = {scratch}\n{operated}{null_updates(updates)}# final state:"


def assignments(writes: Sequence[tuple[int, int]]) -> str:
    """One line for each (register, bit)."""
    return "".join(f"r{register} = {bit}\n" for register, bit in writes)


def query(register: int) -> str:
    return f"query = r{register}\nValue:"


def registers(writes: Sequence[tuple[int, int]], scratch: int, asked: int) -> str:
    """App. F, multi-register latest write: the last bit assigned to the register that is asked for."""
    return f"{assignments(writes)}scratch = {scratch}\n{null_updates(QUERY_UPDATES)}{query(asked)}"


class ProgramText(TextSource):
    """`documents` programs an epoch: counters, a remembered bit, registers."""

    holding_out_hint = "set data.source.validation_fraction between 0 and 1"

    def __init__(self, config: ProgramTextSource) -> None:
        self._config, self._number = config, 0
        self.where = f"program-text (seed {config.seed})"

    def documents(self, split: Split, start: Cursor = START) -> Iterator[tuple[Cursor, str]]:
        for number in range(start[0], self._config.documents):
            cursor, self._number = (number, 0), number
            if cursor >= start and held_out(cursor, self._config.validation_fraction) == (split == "validation"):
                yield cursor, self.program(number)

    def progress(self) -> float:
        return self._number / self._config.documents

    def fingerprint(self) -> dict[str, str]:
        config = self._config
        kind = f"{config.documents} programs of seed {config.seed}, up to {config.updates} null updates"
        return {"source": f"program-text, {kind}, held out {config.validation_fraction:g}"}

    def program(self, number: int) -> str:
        """The program with this number."""
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([self._config.seed, number])))
        return _WRITERS[random.choice(len(_WRITERS), p=_SHARES)](random, self._config.updates)


def _counters(random: np.random.Generator, longest: int) -> str:
    required = _one_of(random, NUMERALS)
    completed = _count_beside(random, required)
    updates = _few(random) if random.random() < 0.7 else _many(random, longest)
    scratch, remark = _one_of(random, SCRATCH), _remark(random, required, completed)
    text = f"{completion(required, completed, scratch, updates, remark)} {_status(required, completed)}\n"
    for _ in range(random.integers(0, 48)):
        if random.random() < 0.5:
            required = _count_beside(random, completed)
            text += f"required = {required}"
        else:
            completed = _count_beside(random, required)
            text += f"completed = {completed}"
        remark = _remark(random, required, completed)
        text += f"{remark}\n{null_updates(_few(random))}Status: {_status(required, completed)}\n"
    return text


def _count_beside(random: np.random.Generator, other: int) -> int:
    """A count that equals the other one half of the time."""
    return other if random.random() < 0.5 else _one_of(random, NUMERALS)


def _status(required: int, completed: int) -> str:
    return STATUS[required == completed]


def _remark(random: np.random.Generator, required: int, completed: int) -> str:
    """A third of the assignments says at once what it leaves, or a small model is slow to compare where it sees a count."""
    return f" {_status(required, completed)}" if random.random() < 0.35 else ""


def _remembered_bit(random: np.random.Generator, longest: int) -> str:
    def operations(most: int) -> list[int]:
        return [_bit(random) for _ in range(random.integers(0, most + 1))]

    state, updates = _bit(random), _delay(random, longest)
    text = f"{memory(state, _bit(random), operations(8), updates)} {BITS[state]}\n"
    for _ in range(random.integers(0, 4)):
        state = _bit(random)
        operated = "".join(f"scratch ^= {bit}\n" for bit in operations(2))
        text += f"state = {state}\n{operated}{null_updates(_few(random))}# final state: {BITS[state]}\n"
    return text


def _registers(random: np.random.Generator, longest: int) -> str:
    named = random.permutation(REGISTERS)[: random.choice([1, 2, 4, 8])]
    latest: dict[int, int] = {}

    def written(number: int) -> str:
        writes = [(int(random.choice(named)), _bit(random)) for _ in range(number)]
        latest.update(writes)
        return assignments(writes)

    def asked() -> str:
        return "".join(f"{query(register)} {BITS[latest[register]]}\n" for register in random.permutation(list(latest)).tolist())

    text = "\n" * int(random.choice([0, 32], p=[0.8, 0.2])) + written(int(random.choice([2, 4, 8, 16, 32, 64], p=_WRITES)))
    text += f"scratch = {_one_of(random, SCRATCH)}\n{null_updates(_few(random) or QUERY_UPDATES)}{asked()}"
    for _ in range(random.integers(0, 4)):
        text += written(int(random.integers(1, 4))) + asked()
    return text


_WRITES = [0.25, 0.25, 0.2, 0.2, 0.07, 0.03]
_WRITERS: list[Callable[[np.random.Generator, int], str]] = [_counters, _remembered_bit, _registers]
_SHARES = [0.4, 0.4, 0.2]


def _bit(random: np.random.Generator) -> int:
    return int(random.integers(2))


def _one_of(random: np.random.Generator, numbers: range) -> int:
    return int(random.integers(numbers.start, numbers.stop))


def _few(random: np.random.Generator) -> int:
    """Null updates between questions."""
    return int(random.integers(3))


def _delay(random: np.random.Generator, longest: int) -> int:
    """Null updates before a program's first question: up to `longest`, every order of magnitude equally likely."""
    return int(math.exp(random.random() * math.log(longest + 2))) - 1


def _many(random: np.random.Generator, longest: int) -> int:
    """Up to `longest`, half of the time every number equally likely, half of the time every order of magnitude."""
    return int(random.integers(longest + 1)) if random.random() < 0.5 else _delay(random, longest)
