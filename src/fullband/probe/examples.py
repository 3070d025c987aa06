"""The examples of App. F: texts that end at a shared colon, with a binary answer that everything before the colon decides.

Examples 2i and 2i + 1 are partners: they are as long as each other, end alike, and their answers differ. Groups are held out whole.

| setting | groups | a group holds | examples |
|---|---|---|---|
| completion | 80 pairs {a, b} of numerals, each of 20 numerals in 8 pairs | (a,a), (a,b), (b,a), (b,b) at 5 delays | 1,600 |
| memory | 128 scratch contexts, all of 7 bits | both states at 5 delays | 1,280 |
| registers, 16 writes, m = 1, 2, 4, 8 | 128 schedules each | the schedule and its complement, every query | 256 … 2,048 |
| registers, m = 8, 2, 4, 8 writes a register | 128 schedules each | the same | 2,048 each |

Where App. F leaves something open: numerals have two digits, so that tokenizers that split digits give all of them the same length, and
there are 20, as single digits make only 45 pairs. A scratch context is its first bit and six operations: five, as in the printed
example, make 64 contexts at most. Every register is written equally often, in random order. No text is in two groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fullband.data.program_text import BITS, NUMERALS, QUERY_UPDATES, SCRATCH, STATUS, completion, memory, registers

Task = Literal["completion", "memory", "registers"]
TASKS: tuple[Task, ...] = ("completion", "memory", "registers")
DELAYS = (0, 8, 32, 128, 256)  # null updates
PAIR_STEPS = (1, 2, 3, 5)  # numeral i is paired with i ± these in a shuffled ring: 20 · 4 pairs
CONTEXT_BITS = 7
SCHEDULES = 128
REGISTER_COUNTS = (1, 2, 4, 8)
SWEEP_WRITES = 16  # assignments in the register-count sweep
WRITES_EACH = (2, 4, 8)  # in the overwrite sweep
OVERWRITTEN = 8  # its registers
REGISTER_SCRATCH = 7
PAPER_TOKENS = {16: 180, 32: 276, 64: 468}  # length of a registers input by its number of assignments


@dataclass(frozen=True)
class Example:
    """`label` is an index into the setting's answers; `updates` the null updates before the question.

    tails   the ends of the text that App. F's recurrent suffixes cover, by k: 1, 2 or 4 tokens in the paper's tokenizer
    """

    text: str
    label: int
    group: int
    updates: int
    tails: dict[int, str]


@dataclass(frozen=True)
class ProbeSetting:
    """Examples that one probe is fitted to, and their two possible answers. `tokens` is the length App. F gives every input, if it does."""

    name: str
    task: Task
    answers: tuple[str, str]
    examples: list[Example]
    groups: int
    registers: int | None = None
    writes_each: int | None = None
    tokens: int | None = None


def build_settings(tasks: Sequence[Task] = TASKS, seed: int = 0, groups: int | None = None) -> list[ProbeSetting]:
    """The settings of these tasks; the first `groups` groups of each (None = all). A pure function of its arguments.

    The setting m = 8 with 2 writes a register belongs to both sweeps, and is built once. Raises ValueError for an unknown task.
    """
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise ValueError(f"unknown probe task '{''.join(unknown[:1])}' (known: {', '.join(TASKS)})")
    settings: list[ProbeSetting] = []
    if "completion" in tasks:
        settings.append(_completion(seed, groups))
    if "memory" in tasks:
        settings.append(_memory(seed, groups))
    if "registers" in tasks:
        swept = [(count, SWEEP_WRITES // count) for count in REGISTER_COUNTS]
        overwritten = [(OVERWRITTEN, each) for each in WRITES_EACH]
        settings += [_registers(seed, groups, *shape) for shape in dict.fromkeys(swept + overwritten)]
    return settings


def _completion(seed: int, limit: int | None) -> ProbeSetting:
    random = _random(seed, 0)
    ring, digits = random.permutation(NUMERALS).tolist(), random.permutation(SCRATCH).tolist()
    pairs = []
    for number, step in enumerate(PAIR_STEPS):
        for i, a in enumerate(ring):
            # Pairs that share a numeral a have different scratch digits, or their (a, a) would be one text in two groups. Along each
            # cycle of a step two digits alternate.
            turn = i // math.gcd(step, len(ring)) % 2
            pairs.append((a, ring[(i + step) % len(ring)], digits[2 * number + turn]))
    chosen = [pairs[number] for number in random.permutation(len(pairs))[:limit].tolist()]
    examples = []
    for updates in DELAYS:
        for group, (a, b, scratch) in enumerate(chosen):
            for required, completed in ((a, a), (a, b), (b, a), (b, b)):
                tails = {1: ":", 2: "Status:", 4: f"{0 if updates else scratch}\nStatus:"}
                text = completion(required, completed, scratch, updates)
                examples.append(Example(text, int(required == completed), group, updates, tails))
    return ProbeSetting("completion", "completion", STATUS, examples, _count(examples))


def _memory(seed: int, limit: int | None) -> ProbeSetting:
    random = _random(seed, 1)
    tails = {1: ":", 2: " state:", 4: "# final state:"}
    contexts = random.permutation(2**CONTEXT_BITS)[:limit].tolist()
    examples = []
    for updates in DELAYS:
        for group, context in enumerate(contexts):
            scratch, *operations = [context >> bit & 1 for bit in range(CONTEXT_BITS)]
            examples += [Example(memory(state, scratch, operations, updates), state, group, updates, tails) for state in (0, 1)]
    return ProbeSetting("memory", "memory", BITS, examples, _count(examples))


def _registers(seed: int, limit: int | None, count: int, writes_each: int) -> ProbeSetting:
    random = _random(seed, 2, count, writes_each)
    examples = []
    for group, (order, bits) in enumerate(_schedules(random, count, writes_each)[:limit]):
        latest = dict(zip(order, bits, strict=True))
        for asked in range(count):
            tails = {1: ":", 2: "Value:", 4: f"{asked}\nValue:"}
            for flip in (0, 1):
                writes = [(register, bit ^ flip) for register, bit in zip(order, bits, strict=True)]
                text = registers(writes, REGISTER_SCRATCH, asked)
                examples.append(Example(text, latest[asked] ^ flip, group, QUERY_UPDATES, tails))
    name = f"registers m={count}, {writes_each} writes each"
    tokens = PAPER_TOKENS[count * writes_each]
    return ProbeSetting(name, "registers", BITS, examples, _count(examples), count, writes_each, tokens)


def _schedules(random: np.random.Generator, count: int, writes_each: int) -> list[tuple[list[int], list[int]]]:
    """(register, bit) of every write, in 128 schedules of which none is another or its complement."""
    schedules: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    while len(schedules) < SCHEDULES:
        order = random.permutation(np.repeat(np.arange(count), writes_each)).tolist()
        bits = random.integers(2, size=len(order)).tolist()
        schedules.setdefault((*order, *(bit ^ bits[0] for bit in bits)), (order, bits))
    return list(schedules.values())


def _count(examples: list[Example]) -> int:
    return len({example.group for example in examples})


def _random(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
