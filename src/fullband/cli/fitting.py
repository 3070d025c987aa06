"""Tables that fit a narrow terminal: numbers are never broken and no column is lost. What does not fit with its headings folded stands
on its side, a column for each row, and where that does not fit either, in several parts one under the other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.table import Table

BETWEEN, EDGES = 3, 1  # columns of the terminal: of padding and divider for each column of a table, and once
SHORTEST = 8  # of a column of words, or of one that is cut off with an ellipsis


class Sheet:
    """The cells of a table as text, and what is known of its columns.

    words   columns of words, from the left: they name a row
    wraps   whether cells of numbers, too, may be wrapped at their spaces
    """

    def __init__(
        self, headings: Sequence[str], rows: Sequence[Sequence[str]], words: int, sections: Sequence[bool] = (), cut: Sequence[bool] = ()
    ):
        self.headings, self.rows, self.words = list(headings), [list(row) for row in rows], words
        self.wraps = False
        self.sections, self.cut = list(sections) or [False] * len(self.rows), list(cut) or [False] * len(self.headings)

    @classmethod
    def of(cls, made: Table) -> Sheet:
        columns = [[str(cell) for cell in column.cells] for column in made.columns]
        words = next((n for n, column in enumerate(made.columns) if column.justify == "right"), len(columns))
        return cls(
            [str(column.header) for column in made.columns],
            list(zip(*columns, strict=True)),
            words,
            [row.end_section for row in made.rows],
            [column.no_wrap and column.overflow == "ellipsis" for column in made.columns],
        )

    def needed(self, column: int) -> int:
        """The fewest columns of the terminal in which no number and no word is broken."""
        cells = [row[column] for row in self.rows]
        heading = max(map(cell_len, folded(self.headings[column], 1, "-").split("\n")))
        if self.cut[column]:
            return max(heading, min(SHORTEST, max(map(cell_len, cells), default=0)))
        wraps = self.wraps or column < self.words
        parts = [part for cell in cells for part in (folded(cell, 1) if wraps else cell).split("\n")]
        return max([heading, *map(cell_len, parts)])

    def width(self, columns: Sequence[int]) -> int:
        return sum(self.needed(column) + BETWEEN for column in columns) + EDGES

    def on_its_side(self) -> Sheet:
        """A column for each row, headed by its first cell."""
        rows = [[self.headings[column], *(row[column] for row in self.rows)] for column in range(1, len(self.headings))]
        side = Sheet([self.headings[0], *(row[0] for row in self.rows)], rows, 1)
        side.wraps = True  # a cell of several numbers has spaces between them
        return side

    def shown(self, columns: Sequence[int], width: int) -> Table:
        """These columns as a table at most `width` wide: headings are folded, words wrapped or cut."""
        room = width - EDGES - BETWEEN * len(columns)
        widths = {column: self.needed(column) for column in columns}
        wanted = {c: max([widths[c], *(cell_len(line) for row in self.rows for line in row[c].split("\n"))]) for c in columns}
        for _ in range(room - sum(widths.values())):  # to those that lack most
            widths[max(columns, key=lambda column: wanted[column] - widths[column])] += 1
        widths = {column: min(widths[column], wanted[column]) for column in columns}
        made = Table(box=box.SIMPLE_HEAD)
        for column in columns:
            made.add_column(
                folded(self.headings[column], widths[column], "-"),
                justify="left" if column < self.words else "right",
                width=widths[column],
                no_wrap=self.cut[column],
                overflow="ellipsis" if self.cut[column] else "fold",
            )
        for row, ends in zip(self.rows, self.sections, strict=True):
            cells = (row[column] if self.cut[column] else folded(row[column], widths[column]) for column in columns)
            made.add_row(*cells, end_section=ends)
        return made


def fitted(made: Table, width: int) -> list[Table]:
    """The table in at most `width` columns of the terminal: as it is, folded, on its side, or in parts."""
    sheet = Sheet.of(made)
    every = range(len(sheet.headings))
    natural = sum(max([cell_len(sheet.headings[c]), *(cell_len(row[c]) for row in sheet.rows)]) + BETWEEN for c in every) + EDGES
    if natural <= width:
        return [made]
    if sheet.width(every) <= width:
        return [sheet.shown(every, width)]
    side = sheet.on_its_side()
    across = range(len(side.headings))
    if sheet.rows and side.width(across) <= width:
        return [side.shown(across, width)]
    names, numbers = list(range(min(sheet.words, 1))), list(range(min(sheet.words, 1), len(sheet.headings)))
    sheet.wraps = True  # for a column that would be too wide alone
    parts: list[list[int]] = []
    for column in numbers:
        if parts and sheet.width([*names, *parts[-1], column]) <= width:
            parts[-1].append(column)
        else:
            parts.append([column])
    return [sheet.shown([*names, *part], width) for part in parts]


def folded(text: str, width: int, after: str = "") -> str:
    """Text in lines of at most `width` where it can be broken: at spaces, except after a colon ("exact: 1.64"), and after the
    characters `after`. What cannot stays longer."""
    lines = [""]
    for word in re.split(rf"(?<=[^:] )|(?<=[{re.escape(after)}])" if after else r"(?<=[^:] )", text):
        if lines[-1] and cell_len((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)
