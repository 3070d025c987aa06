"""Built-in tasks with an answer at every position: the state of something that each token changes.

Both are inherently sequential for a standard transformer of fixed depth: the answer at t depends on all tokens up to t, in order.
A token is an operation; the target at its position is the state after it (not the next token).

- Group word problem: tokens g_1, g_2, ... are drawn uniformly from a group; the target at t is the product g_1 g_2 ... g_t.
  Permutations multiply from left to right: (g h)(x) = h(g(x)), so the product is "g_1 first". Elements are numbered by the
  lexicographic order of their one-line notation, so 0 is the identity (012 for S3). In Z_n element k is the number k.
- Modular arithmetic: the state starts at 0 and each token adds, subtracts or multiplies, modulo n: ids 0..n-1 are +0..+(n-1) and
  written "0".."n-1"; then "-0".."-(n-1)"; then "*u" for every u from 1 to n-1 that is coprime to n. Multiplying by such a u loses
  nothing, so all states stay equally likely (once one addition or subtraction has happened).

Answers are ids too: state k is id k, written "k".

Example i of a split is a pure function of (seed, split, task, i): its tokens are 64-bit words of a Philox stream whose key comes
from (seed, split, task) and whose counter starts at i * 2^128. Splits have different keys, batches may be cut anywhere, and a longer
row begins with the shorter one. (Streams are disjoint; single short rows of a small group can of course coincide.)
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from itertools import permutations
from typing import Literal

import numpy as np
import torch

from fullband.config import TaskSource
from fullband.data.batch import Batch

Split = Literal["train", "validation"]
_SPLIT_KEYS: dict[Split, int] = {"train": 0, "validation": 1}


class Task(ABC):
    """A task: `names` of its token ids, `states` answers (ids 0..states-1)."""

    def __init__(self, name: str, names: list[str], states: int) -> None:
        self.name = name
        self.names = names
        self.states = states

    @property
    def vocab_size(self) -> int:
        return len(self.names)

    @property
    def chance(self) -> float:
        """Accuracy of guessing: one over the number of states."""
        return 1 / self.states

    @abstractmethod
    def answers(self, tokens_BT: np.ndarray) -> np.ndarray:
        """The state after each token; int64 [B, T] to int64 [B, T]."""

    def examples(self, seed: int, split: Split, start: int, rows: int, length: int) -> Batch:
        """Examples start..start+rows-1 of a split, `length` positions each: one document a row, a target everywhere."""
        key = np.random.SeedSequence([seed, _SPLIT_KEYS[split], zlib.crc32(self.name.encode())]).generate_state(2, np.uint64)
        words_BT = np.stack([np.random.Philox(key=key, counter=[0, 0, row, 0]).random_raw(length) for row in range(start, start + rows)])
        # The high 32 bits, scaled: ids are uniform to within vocab_size / 2^32, and every id costs exactly one word.
        tokens_BT = ((words_BT >> np.uint64(32)) * np.uint64(self.vocab_size) >> np.uint64(32)).astype(np.int64)
        return Batch(
            tokens=torch.from_numpy(tokens_BT),
            targets=torch.from_numpy(self.answers(tokens_BT)),
            positions=torch.arange(length).expand(rows, length).contiguous(),
            documents=torch.zeros((rows, length), dtype=torch.long),
        )


class GroupWord(Task):
    """Running products in a finite group; `table_NN[a, b]` is the element a b."""

    def __init__(self, group: str) -> None:
        self.table_NN = group_table(group)
        order = len(self.table_NN)
        super().__init__(f"group-word {group}", [str(element) for element in range(order)], order)

    def answers(self, tokens_BT: np.ndarray) -> np.ndarray:
        products_BT = tokens_BT.copy()
        shift = 1
        while shift < products_BT.shape[1]:  # parallel scan: after each turn, position t holds the product of its last 2·shift tokens
            products_BT[:, shift:] = self.table_NN[products_BT[:, :-shift], products_BT[:, shift:]]
            shift *= 2
        return products_BT


class Modular(Task):
    """Running additions, subtractions and multiplications modulo n."""

    def __init__(self, modulus: int) -> None:
        units = [unit for unit in range(1, modulus) if math.gcd(unit, modulus) == 1]
        numbers = np.arange(modulus)
        ones, zeros = np.ones(modulus, dtype=np.int64), np.zeros(len(units), dtype=np.int64)
        # every operation is x -> factor·x + term
        self.factor_V = np.concatenate([ones, ones, np.array(units)])
        self.term_V = np.concatenate([numbers, -numbers % modulus, zeros])
        self.modulus = modulus
        names = [str(k) for k in numbers] + [f"-{k}" for k in numbers] + [f"*{unit}" for unit in units]
        super().__init__(f"modular {modulus}", names, modulus)

    def answers(self, tokens_BT: np.ndarray) -> np.ndarray:
        factor_BT, term_BT = self.factor_V[tokens_BT], self.term_V[tokens_BT]
        shift = 1
        while shift < tokens_BT.shape[1]:  # parallel scan over composed affine maps; the earlier one is applied first
            term_BT[:, shift:] = (factor_BT[:, shift:] * term_BT[:, :-shift] + term_BT[:, shift:]) % self.modulus
            factor_BT[:, shift:] = factor_BT[:, shift:] * factor_BT[:, :-shift] % self.modulus
            shift *= 2
        return term_BT  # the map of the first t tokens, applied to 0


def group_table(group: str) -> np.ndarray:
    """Multiplication table of S3..S5, A4, A5 or Z_n ("Z7"): int64 [N, N], entry [a, b] is the element a b, 0 is the identity."""
    kind, size = group[0], int(group[1:])
    if kind == "Z":
        numbers = np.arange(size)
        return (numbers[:, None] + numbers) % size
    elements = permutations_of(group)
    rank = {element: number for number, element in enumerate(elements)}
    return np.array([[rank[tuple(h[image] for image in g)] for h in elements] for g in elements])  # (g h)(x) = h(g(x))


def permutations_of(group: str) -> list[tuple[int, ...]]:
    """The elements of S3..S5, A4 or A5 in one-line notation: element g takes what stands at place x to place g[x]."""
    return [p for p in permutations(range(int(group[1:]))) if group[0] == "S" or _is_even(p)]


def _is_even(permutation: tuple[int, ...]) -> bool:
    inversions = sum(a > b for i, a in enumerate(permutation) for b in permutation[i + 1 :])
    return inversions % 2 == 0


def build_task(source: TaskSource) -> Task:
    """The task of a recipe."""
    return GroupWord(source.group) if source.task == "group-word" else Modular(source.modulus)
