"""Prompts that are kept between requests: the next turn of a chat, or the same instructions with another question, begins as they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fullband.decode.prefill import Prefilled
from fullband.feedback.connection import Connection
from fullband.feedback.passes import PassState
from fullband.feedback_config import FeedbackPasses

BLOCK = 16  # tokens: beginnings are found by whole blocks, so that many prompts end at the same one and are run together


@dataclass(frozen=True, eq=False)
class Prefix:
    """A prompt that was prefilled, and nothing that was generated after it: its tokens were computed in one prefill.

    prefilled  every pass with all of its keys, one sequence
    states     of every position, [1, T, D] for each pass: what the next position, and the next pass, is fed with
    """

    tokens: tuple[int, ...]
    prefilled: Prefilled
    states: tuple[Tensor, ...]

    @classmethod
    def of_row(cls, tokens: Sequence[int], done: Prefilled, row: int, states: Sequence[Tensor]) -> Prefix:
        """A copy of one sequence of a batch that was padded on the right: it holds on to nothing of the others."""
        length = len(tokens)
        rows = torch.tensor([row], device=states[0].device)

        def alone(cache: Any) -> Any:
            return None if cache is None else replace(cache.crop(length).select(rows), documents=None)

        passes = tuple(PassState(alone(each.cache)) for each in done.passes)
        return cls(tuple(tokens), replace(done, passes=passes, below=alone(done.below)), tuple(states))

    def first(self, length: int, connection: Connection) -> Prefilled:
        """Where every pass stood after the first `length` positions."""
        cut = [
            PassState(each.cache.crop(length), connection.roll(None, states_1TD[:, :length]))
            for each, states_1TD in zip(self.prefilled.passes, self.states, strict=True)
        ]
        below = self.prefilled.below
        return replace(self.prefilled, passes=tuple(cut), below=None if below is None else below.crop(length))


class PrefixCache:
    """Prefixes within a bound in bytes; the one that was used longest ago goes first. Other feedback passes find other prefixes.

    A prompt that adds less than a quarter to what it shares with a kept one is not kept beside it: so little is run again.
    """

    def __init__(self, limit: int):
        """`limit`: bytes; 0 = nothing is kept."""
        self.limit, self.bytes = limit, 0
        self._kept: dict[Prefix, tuple[list[int], int]] = {}  # the marks of its blocks, its bytes; least recently used first
        self._holders: dict[int, dict[Prefix, None]] = {}  # of each mark

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, passes: FeedbackPasses, prompt: Sequence[int]) -> tuple[Prefix | None, int]:
        """A prefix that begins as the prompt does, and for how many tokens; at least the prompt's last one is left to be run."""
        found, length = None, 0
        for mark in _marks(passes, prompt[:-1]):
            holders = self._holders.get(mark)
            if not holders:
                break
            found, length = next(reversed(holders)), length + BLOCK
        if found is None or found.tokens[:length] != tuple(prompt[:length]):  # marks may coincide
            return None, 0
        self._kept[found] = self._kept.pop(found)
        return found, length

    def keep(self, passes: FeedbackPasses, prompt: Sequence[int], done: Prefilled, row: int, states: Sequence[Tensor]) -> None:
        """Keep a prompt that was prefilled as one row of a batch (`done`), with its `states`, if it is worth it. What it begins with need
        not be kept beside it."""
        marks = list(_marks(passes, prompt))
        shared = next((number for number, mark in enumerate(marks) if mark not in self._holders), len(marks))
        begun = [prefix for mark in marks for prefix in self._holders.get(mark, ()) if self._kept[prefix][0][-1] == mark]
        if shared == len(marks) or (not begun and 4 * (len(marks) - shared) < len(marks)):
            return
        caches = [cache for cache in (done.below, *(each.cache for each in done.passes)) if cache is not None]
        size = sum(cache.crop(len(prompt)).bytes // cache.batch for cache in caches) + sum(states_1TD.nbytes for states_1TD in states)
        if size > self.limit:
            return
        for prefix in begun:
            self._drop(prefix)
        while self.bytes + size > self.limit:
            self._drop(next(iter(self._kept)))
        made = Prefix.of_row(prompt, done, row, states)
        self._kept[made] = marks, size
        self.bytes += size
        for mark in marks:
            self._holders.setdefault(mark, {})[made] = None

    def _drop(self, prefix: Prefix) -> None:
        marks, size = self._kept.pop(prefix)
        self.bytes -= size
        for mark in marks:
            del self._holders[mark][prefix]
            if not self._holders[mark]:
                del self._holders[mark]


def _marks(passes: FeedbackPasses, tokens: Sequence[int]) -> Iterator[int]:
    """One number for each beginning that ends with a whole block."""
    mark = hash(passes)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        mark = hash((mark, *tokens[start : start + BLOCK]))
        yield mark
