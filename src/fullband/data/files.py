"""Local files as a text source: txt, jsonl and parquet; txt and jsonl also as .gz and .zst.

Every complaint is one line: where, what, and what to do about it.
"""

from __future__ import annotations

import glob
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from fullband.config import FilesSource
from fullband.data.compressed import COMPRESSIONS, bytes_read, open_bytes
from fullband.data.optional import optional
from fullband.data.records import RecordReader, TextRecords
from fullband.data.sources import START, Cursor, HeldOutEnd, TextSource, fingerprint_files, held_out, held_out_end
from fullband.data.tasks import Split

KINDS = {".txt": "txt", ".text": "txt", ".md": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
PIECE = 16_000  # characters after which a txt file is cut at the next line end
LONGEST_LINE = 64_000  # a line is cut after this many more
SMALL = 16_000_000  # characters up to which a source with an empty split has its end held out instead


class Files(TextSource):
    """Files in the order of `paths`, each glob sorted. A txt file is cut into documents at line ends, so part of one can be held out.

    With `validation_paths`, those files are the validation split and are taken out of `paths` should a glob there match them too;
    otherwise `validation_fraction` of the documents is. Where there are so few documents that this would leave a split empty, the end of
    the text is held out (`sources.held_out_end`).
    """

    def __init__(self, config: FilesSource, reader: RecordReader | None = None) -> None:
        """`reader` says what a record is read as: by default `text_field`.

        ValueError for a missing, empty or unknown kind of file, a folder, a glob without match, a missing package.
        """
        validation = _expand(config.validation_paths)
        taken = {file.resolve() for file in validation}
        training = [file for file in _expand(config.paths) if file.resolve() not in taken]
        if not training:
            raise ValueError(f"{', '.join(config.paths)}: every file is also in validation_paths, so nothing is left to train on")
        self._files = {"train": training, "validation": validation or training}
        self._fraction = None if validation else config.validation_fraction
        self._reader = reader or TextRecords(config.text_field)
        self._sizes, self._before = [1], 0  # bytes of the files of the split that is being read, and of those before the file at hand
        self._stream: IO[bytes] | None = None
        self.where = config.paths[0] + (f" and {len(training) - 1} more files" if len(training) > 1 else "")
        self.holding_out_hint = "change data.source.validation_fraction, or name data.source.validation_paths"
        for file in training + validation:
            _check(file)
            if not self._reader.texts_only and KINDS[_suffix(file)] == "txt":
                raise ValueError(f"{file}: a plain text has no fields; name .jsonl or .parquet files")

    def documents(self, split: Split, start: Cursor = START) -> Iterator[tuple[Cursor, str]]:
        end = self._end
        for cursor, text in self._documents(split, start, lambda cursor: end is not None or self._is_in(split, cursor)):
            text = text if end is None else end.part_of(split, cursor, text)
            if text.strip():
                yield cursor, text

    def _is_in(self, split: Split, cursor: Cursor) -> bool:
        return self._fraction is None or held_out(cursor, self._fraction) == (split == "validation")

    def _documents(self, split: Split, start: Cursor, wanted: Callable[[Cursor], bool]) -> Iterator[tuple[Cursor, str]]:
        """Documents of the split's files, those that are not blank."""
        files = self._files[split]
        self._sizes = [file.stat().st_size for file in files]
        for number in range(start[0], len(files)):
            self._before, self._stream = sum(self._sizes[:number]), None
            first = start[1] if number == start[0] else 0
            for record, text in self._records(files[number], number, first, wanted):
                if text.strip():
                    yield (number, record), text

    def _records(self, file: Path, number: int, first: int, are: Callable[[Cursor], bool]) -> Iterator[tuple[int, str]]:
        def wanted(record: int) -> bool:
            return record >= first and are((number, record))

        kind = KINDS[_suffix(file)]
        with _explained(file):
            if kind == "parquet":
                yield from ((record, text) for record, text in _parquet(file, self._reader, first) if wanted(record))
                return
            with open_bytes(file) as stream:
                self._stream = stream
                if kind == "txt":
                    yield from ((record, text) for record, text in enumerate(_pieces(stream)) if wanted(record))
                    return
                for record, line in enumerate(stream):
                    if wanted(record) and line.strip():
                        yield record, _text_of_line(line, self._reader, f"{file}:{record + 1}")

    @cached_property
    def _end(self) -> HeldOutEnd | None:
        """The end that is held out because whole documents would leave a split empty; None where they do not."""
        if not self._fraction:
            return None
        found: list[tuple[Cursor, str]] = []
        characters, splits = 0, set()
        for cursor, text in self._documents("train", START, lambda cursor: True):
            found.append((cursor, text))
            characters += len(text)
            splits.add(held_out(cursor, self._fraction))
            if len(splits) == 2 or characters > SMALL:
                return None
        return held_out_end(found, self._fraction, may_cut=self._reader.texts_only)

    def progress(self) -> float:
        of_file = bytes_read(self._stream) if self._stream and not self._stream.closed else 0
        return (self._before + of_file) / sum(self._sizes)

    def notices(self) -> list[str]:
        if self._end is None:
            return []
        return [f"{self.where}: too few documents to hold out a whole one, so the end of the text is held out: {self._end}"]

    def fingerprint(self) -> dict[str, str]:
        kind = "files" if self._fraction is None else f"files, held out {self._fraction:g}"
        names = {"source": f"{kind}, {self._reader.describe()}", "files": fingerprint_files(self._files["train"])}
        return names | ({"validation files": fingerprint_files(self._files["validation"])} if self._fraction is None else {})


def _expand(paths: list[str]) -> list[Path]:
    """Files of paths and globs, without repetitions."""
    found: dict[Path, None] = {}
    for pattern in paths:
        path = Path(os.path.expanduser(pattern))
        if path.is_file():
            found[path] = None
        elif path.is_dir():
            raise ValueError(f"{pattern}: is a folder; name its files, for example {pattern.rstrip('/')}/**/*.jsonl")
        elif glob.has_magic(pattern):
            matches = [Path(match) for match in sorted(glob.glob(_pattern(path), recursive=True))]
            matches = [match for match in matches if match.is_file()]
            if not matches:
                raise ValueError(f"{pattern}: no file matches this pattern")
            found.update(dict.fromkeys(matches))
        else:
            raise ValueError(f"{pattern}: no such file")
    return list(found)


def _pattern(path: Path) -> str:
    """`path` as a glob in which folders that are there stand for themselves, whatever characters their names have."""
    parts = path.parts
    kept = max(number for number in range(len(parts)) if Path(*parts[:number]).is_dir())
    return str(Path(glob.escape(str(Path(*parts[:kept]))), *parts[kept:]))


def _check(file: Path) -> None:
    """What can be said about a file before reading it."""
    suffix, compressed = _suffix(file), file.suffix.lower() in COMPRESSIONS
    if suffix not in KINDS or (compressed and suffix == ".parquet"):
        raise ValueError(f"{file}: must be a .txt, .md, .jsonl or .parquet file; all but parquet also as .gz or .zst")
    if file.stat().st_size == 0:
        raise ValueError(f"{file}: the file is empty")
    if suffix == ".parquet":
        optional("pyarrow", f"{file}: parquet")
    if file.suffix.lower() == ".zst":
        optional("zstandard", f"{file}: zst")


def _suffix(file: Path) -> str:
    """.jsonl for data.jsonl and for data.jsonl.gz."""
    name = Path(file.stem) if file.suffix.lower() in COMPRESSIONS else file
    return name.suffix.lower()


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Errors of reading `file` as one line."""
    try:
        yield
    except UnicodeDecodeError:
        raise ValueError(f"{_broken_utf8(file)}: not valid UTF-8; convert the file, for example with iconv -t UTF-8") from None
    except PermissionError:
        raise ValueError(f"{file}: cannot be read (permission denied)") from None
    except (EOFError, OSError, zlib.error) as error:
        if file.suffix.lower() in COMPRESSIONS:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{file}: a damaged or cut short {file.suffix} file ({reason}); make or download it again, or join its parts"
            ) from None
        raise ValueError(f"{file}: cannot be read ({error})") from None


def _broken_utf8(file: Path) -> str:
    """file:line of the first bytes that are not UTF-8 (a parquet file has no lines)."""
    if _suffix(file) == ".parquet":
        return str(file)
    with open_bytes(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f"{file}:{number}"
    return str(file)


def _pieces(stream: IO[bytes]) -> Iterator[str]:
    """A text in pieces of about PIECE characters that end with a line."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    while piece := text.read(PIECE):
        yield piece if piece.endswith("\n") else piece + text.readline(LONGEST_LINE)


def _text_of_line(line: bytes, reader: RecordReader, where: str) -> str:
    try:
        record = json.loads(line.rstrip())  # a message counts columns in this line, not in an empty one after it
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg}, column {error.colno}); fix or remove this line") from None
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise ValueError(f"{where}: not readable as JSON ({str(error).partition('; use sys.')[0]}); fix or remove this line") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a {type(record).__name__}, not a JSON object with a field '{reader.fields[0]}'")
    return reader.text(record, where)


def _parquet(file: Path, reader: RecordReader, first: int) -> Iterator[tuple[int, str]]:
    """(row, text) from about row `first` on: whole row groups before it are skipped unread."""
    parquet, arrow = optional("pyarrow.parquet", f"{file}: parquet"), optional("pyarrow", f"{file}: parquet")
    try:
        with parquet.ParquetFile(file) as table:
            names = dict.fromkeys(table.schema_arrow.names)
            for field in reader.fields:
                reader.value(names, field, str(file))
                if table.schema_arrow.names.count(field) > 1:
                    raise ValueError(f"{file}: more than one column is called '{field}'; rename all but one, or set {reader.setting}")
                kind = table.schema_arrow.field(field).type
                if reader.texts_only and not _is_text(kind, arrow.types):
                    raise ValueError(f"{file}: the field '{field}' must be text, got {kind} ({reader.hint(names)})")
            row = 0
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if row + rows > first:
                    records = table.read_row_group(group, columns=reader.fields).to_pylist()
                    yield from ((row + i, reader.text_of_row(record, f"{file}, row {row + i}")) for i, record in enumerate(records))
                row += rows
    except (arrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{file}: a damaged parquet file, or not one ({reason}); make or download it again") from None


def _is_text(kind: Any, types: Any) -> bool:
    """Whether a column of this Arrow type gives strings, however they are stored."""
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _is_text(kind.value_type, types)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
