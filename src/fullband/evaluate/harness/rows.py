"""Rows of ids to read, and which of them begin alike, so that the common beginning is read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LEAST_SAVED = 64  # positions: sharing takes a second call of the trunk


@dataclass(frozen=True)
class Row:
    """Inputs that one or several requests read: those that differ in their last token alone share it.

    start   position of the first input of a continuation; the state before it is the first that is scored
    places  of the requests
    """

    inputs: tuple[int, ...]
    start: int
    places: list[int]


@dataclass(frozen=True)
class Group:
    """Rows whose first `shared` inputs are the same, and are none that is scored."""

    rows: list[Row]
    shared: int

    @property
    def longest(self) -> int:
        return max(len(row.inputs) for row in self.rows)

    @property
    def saved(self) -> int:
        """Positions that need not be read."""
        return self.shared * (len(self.rows) - 1)


def rows_of(inputs_and_starts: Sequence[tuple[tuple[int, ...], int]]) -> list[Row]:
    """The rows to read for requests of these inputs, whose continuation begins at `start`."""
    rows: dict[tuple[tuple[int, ...], int], Row] = {}
    for place, (inputs, start) in enumerate(inputs_and_starts):
        rows.setdefault((inputs, start), Row(inputs, start, [])).places.append(place)
    return list(rows.values())


def group_rows(rows: Sequence[Row], most: int, whatever_saved: bool = False) -> tuple[list[Group], list[Row]]:
    """(groups of at most `most` rows, rows that are better read whole).

    A row joins the one before it in order of inputs as long as that saves positions, wherever the common part comes from: the choices
    of one question, or examples that questions share.

    whatever_saved   groups however little they save: of a single row, too, whose context is then read apart
    """
    groups: list[Group] = []
    for row in sorted(rows, key=lambda row: row.inputs):
        if groups and len(groups[-1].rows) < most:
            last = groups[-1]
            joined = Group([*last.rows, row], min(last.shared, row.start - 1, _common(last.rows[0].inputs, row.inputs)))
            if joined.saved > last.saved:
                groups[-1] = joined
                continue
        groups.append(Group([row], row.start - 1))
    least = 0 if whatever_saved else LEAST_SAVED
    shared = [group for group in groups if group.shared and group.saved >= least]
    return shared, [row for group in groups if not group.shared or group.saved < least for row in group.rows]


def batches_of_groups(groups: Sequence[Group], size: int) -> Iterator[list[Group]]:
    """Batches of at most `size` rows. Longest first: a batch then has little padding, and the first one shows the memory needed."""
    batch: list[Group] = []
    for group in sorted(groups, key=lambda group: (-group.shared, -group.longest)):
        if batch and sum(len(other.rows) for other in batch) + len(group.rows) > size:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def batches_of_rows(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    """Batches of at most `size` rows, longest first."""
    ordered = sorted(rows, key=lambda row: (-len(row.inputs), row.inputs))
    for first in range(0, len(ordered), size):
        yield ordered[first : first + size]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    known, most = 0, min(len(a), len(b))
    while known < most:
        middle = (known + most + 1) // 2
        known, most = (middle, most) if a[known:middle] == b[known:middle] else (known, middle - 1)
    return known
