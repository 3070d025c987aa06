"""Local files as a text source: txt, jsonl and parquet; txt and jsonl also as .gz and .zst.

Every complaint is one line: where, what, and what to do about it.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from fullband.config import FilesSource
from fullband.data.optional import optional
from fullband.data.records import RecordReader, TextRecords
from fullband.data.sources import START, Cursor, TextSource, fingerprint_files, held_out
from fullband.data.tasks import Split

KINDS = {".txt": "txt", ".text": "txt", ".md": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
PIECE = 16_000  # characters after which a txt file is cut at the next line end
LONGEST_LINE = 64_000  # a line is cut after this many more


class Files(TextSource):
    """Files in the order of `paths`, each glob sorted. A txt file is cut into documents at line ends, so part of one can be held out.

    With `validation_paths`, those files are the validation split and are taken out of `paths` should a glob there match them too;
    otherwise `validation_fraction` of the documents is.
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
        self.where = config.paths[0] + (f" and {len(training) - 1} more files" if len(training) > 1 else "")
        self.holding_out_hint = "change data.source.validation_fraction, or name data.source.validation_paths"
        for file in training + validation:
            _check(file)
            if not self._reader.texts_only and KINDS[_suffix(file)] == "txt":
                raise ValueError(f"{file}: a plain text has no fields; name .jsonl or .parquet files")

    def documents(self, split: Split, start: Cursor = START) -> Iterator[tuple[Cursor, str]]:
        files = self._files[split]
        for number in range(start[0], len(files)):
            first = start[1] if number == start[0] else 0
            for record, text in self._records(files[number], number, first, split):
                if text.strip():
                    yield (number, record), text

    def _records(self, file: Path, number: int, first: int, split: Split) -> Iterator[tuple[int, str]]:
        def wanted(record: int) -> bool:
            if record < first:
                return False
            return self._fraction is None or held_out((number, record), self._fraction) == (split == "validation")

        kind = KINDS[_suffix(file)]
        with _explained(file):
            if kind == "parquet":
                yield from ((record, text) for record, text in _parquet(file, self._reader, first) if wanted(record))
                return
            with _open(file) as stream:
                if kind == "txt":
                    yield from ((record, text) for record, text in enumerate(_pieces(stream)) if wanted(record))
                    return
                for record, line in enumerate(stream):
                    if wanted(record) and line.strip():
                        yield record, _text_of_line(line, self._reader, f"{file}:{record + 1}")

    def fingerprint(self) -> dict[str, str]:
        kind = "files" if self._fraction is None else f"files, held out {self._fraction:g}"
        names = {"source": f"{kind}, {self._reader.describe()}", "files": fingerprint_files(self._files["train"])}
        return names | ({"validation files": fingerprint_files(self._files["validation"])} if self._fraction is None else {})


def _expand(paths: list[str]) -> list[Path]:
    """Files of paths and globs, without repetitions."""
    found: dict[Path, None] = {}
    for pattern in paths:
        path = Path(pattern).expanduser()
        if path.is_file():
            found[path] = None
        elif path.is_dir():
            raise ValueError(f"{pattern}: is a folder; name its files, for example {pattern.rstrip('/')}/**/*.jsonl")
        elif glob.has_magic(pattern):
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            matches = [match for match in matches if match.is_file()]
            if not matches:
                raise ValueError(f"{pattern}: no file matches this pattern")
            found.update(dict.fromkeys(matches))
        else:
            raise ValueError(f"{pattern}: no such file")
    return list(found)


def _check(file: Path) -> None:
    """What can be said about a file before reading it."""
    suffix, compressed = _suffix(file), file.suffix.lower() in COMPRESSIONS
    if suffix not in KINDS or (compressed and suffix == ".parquet"):
        raise ValueError(f"{file}: not a kind of file this reads (.txt, .md, .jsonl, .parquet; .gz and .zst of all but parquet)")
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
            raise ValueError(f"{file}: a damaged or cut short {file.suffix} file ({reason}); make or download it again") from None
        raise ValueError(f"{file}: cannot be read ({error})") from None


def _broken_utf8(file: Path) -> str:
    """file:line of the first bytes that are not UTF-8 (a parquet file has no lines)."""
    if _suffix(file) == ".parquet":
        return str(file)
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f"{file}:{number}"
    return str(file)


def _open(file: Path) -> IO[bytes]:
    """The uncompressed bytes."""
    if file.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    if file.suffix.lower() == ".zst":
        return io.BufferedReader(_ZstdReader(file), buffer_size=2**20)
    return file.open("rb")


class _ZstdReader(io.RawIOBase):
    """Uncompressed bytes of a .zst file of one or more frames. (zstandard's own reader takes a cut short file for a whole one.)"""

    def __init__(self, file: Path) -> None:
        self._zstandard = optional("zstandard", f"{file}: zst")
        self._stream = file.open("rb")
        self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        self._frame_is_new = True
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            data = data or self._stream.read(2**17)
            if self._frame.eof and data:
                self._frame, self._frame_is_new = self._zstandard.ZstdDecompressor().decompressobj(), True
            if not data:
                if self._frame.eof or self._frame_is_new:
                    return 0
                raise EOFError("it ends inside a frame")
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            self._frame_is_new = False
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._stream.close()
        super().close()


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
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a {type(record).__name__}, not a JSON object with a field '{reader.fields[0]}'")
    return reader.text(record, where)


def _parquet(file: Path, reader: RecordReader, first: int) -> Iterator[tuple[int, str]]:
    """(row, text) from about row `first` on: whole row groups before it are skipped unread."""
    parquet, arrow = optional("pyarrow.parquet", f"{file}: parquet"), optional("pyarrow", f"{file}: parquet")
    try:
        with parquet.ParquetFile(file) as table:
            for field in reader.fields:
                reader.value(dict.fromkeys(table.schema_arrow.names), field, str(file))
                kind = table.schema_arrow.field(field).type
                is_text = arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)
                if reader.texts_only and not is_text:
                    raise ValueError(f"{file}: the field '{field}' holds {kind}, not text (set {reader.setting})")
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
