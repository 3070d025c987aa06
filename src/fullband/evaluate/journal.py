"""A journal: finished pieces of work as JSON lines, so that an interrupted evaluation goes on where it stopped. SHAPES are those of an
evaluation's records: a line that is JSON and none of these is damage, named by its file and line."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from fullband.strict import list_of, shape

_ABOUT: dict[str, Any] = {"data_hash": str, "prompt_hash": list[str], "seconds": float}
_TASK = shape("Task", kind=Literal["task"], metric=str, shots=int | None, **_ABOUT)
_PROBLEMS = shape("Problems", kind=Literal["generative"], problems=list[int], **_ABOUT)
_SCORES = dict[str, dict[str, float]]
_ROLLOUT = shape("Rollout", text=str, tokens=int, finish=str)
SHAPES: dict[str, Any] = {
    "scores": dict[str, tuple[float, bool]],  # by evaluation: the log-likelihood of a continuation, and whether it is the greedy one
    # Older documents, and those without choices, lack `chance`; older rollouts their `question`.
    "documents": shape("Document", task=str, document=int, prompt_hash=str, scores=_SCORES, chance=(dict[str, float], None)),
    "rollouts": shape("Rollouts", question=(str, ""), cut=int, rollouts=list_of(_ROLLOUT)),
    "grades": shape("Grades", verdicts=list[str], details=list[Any]),
    "tasks": Annotated[_TASK | _PROBLEMS, Field(discriminator="kind")],
}


class Journal(Mapping[str, Any]):
    """Records by key, in a file that only grows; without a path, in memory alone.

    A line that a kill cut off is not read, and dropped when the file is written to again. Raises ValueError for a file with damage
    elsewhere, such as a record of another shape than `shape`, a type that pydantic knows.
    """

    def __init__(self, path: Path | None = None, shape: Any = Any):
        self.path = path
        self._shape: TypeAdapter[Any] = TypeAdapter(shape)
        self._records: dict[str, Any] = {}
        self._cut_at: int | None = None  # where the line begins that a kill cut off
        if path is not None and path.is_file():
            self._read(path)

    def __getitem__(self, key: str) -> Any:
        return self._records[key]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def add(self, records: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Keep these records, on disk when this returns. A key that is there takes the new value. Raises OSError naming the file."""
        new = dict(records)
        self._records |= new
        if self.path is None or not new:
            return
        try:
            if self._cut_at is not None:
                os.truncate(self.path, self._cut_at)
                self._cut_at = None
            with open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:  # half a surrogate pair, as JSON escapes it
                file.writelines(_line(key, value) for key, value in new.items())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._cut_at = whole
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                entry = json.loads(line)
                if not isinstance(entry, list) or len(entry) not in (2, 3) or not isinstance(entry[0], str):
                    raise ValueError
                if len(entry) == 3 and line + b"\n" != _line(*entry[:2]).encode(errors="backslashreplace"):  # older lines have no checksum
                    raise ValueError
                self._shape.validate_python(entry[1])  # its ValidationError is a ValueError
            except (ValueError, RecursionError):
                raise ValueError(f"{path}:{number}: damaged; remove the line, and what it held is computed again") from None
            self._records[entry[0]] = entry[1]


def _line(key: str, value: Any) -> str:
    """A record with its checksum, which finds a flipped bit where the line is still JSON."""
    text = json.dumps([key, value], ensure_ascii=False)
    return f"{text[:-1]}, {zlib.crc32(text.encode(errors='backslashreplace'))}]\n"
