"""The running interpreter's own standard library as a text source."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from fullband.config import PythonStdlibSource
from fullband.data.sources import START, Cursor, TextSource, fingerprint_files, held_out
from fullband.data.tasks import Split


class PythonStdlib(TextSource):
    """The running interpreter's own library: one document a .py file, sorted by path.

    Left out: site-packages, tests, tables rather than text (encodings, pydoc_data), code kept for compatibility (lib2to3, idlelib),
    files written at installation (_sysconfigdata*, config-*), and files that are not UTF-8. CPython 3.11: about 450 files, 9 MB.
    """

    EXCLUDED = (
        "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "encodings", "pydoc_data",
        "__pycache__", "config-*", "_sysconfigdata*",
    )  # fmt: skip

    def __init__(self, config: PythonStdlibSource, root: str | Path | None = None) -> None:
        """`root` defaults to this interpreter's library. ValueError if it holds no .py files (a zipped library)."""
        self.root = Path(root or sysconfig.get_path("stdlib"))
        self.where = f"python-stdlib ({self.root})"
        self.holding_out_hint = "set data.source.validation_fraction between 0 and 1"
        self.files = sorted(self._files(), key=lambda file: file.relative_to(self.root).as_posix())
        self._fraction, self._number = config.validation_fraction, 0
        if not self.files:
            raise ValueError(f"{self.where}: no .py files there; this interpreter hides its library, use local files instead")

    def _files(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not self._is_excluded(name)]
            yield from (Path(folder, name) for name in names if name.endswith(".py") and not self._is_excluded(name))

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.EXCLUDED)

    def documents(self, split: Split, start: Cursor = START) -> Iterator[tuple[Cursor, str]]:
        for number in range(start[0], len(self.files)):
            cursor, self._number = (number, 0), number
            if cursor < start or held_out(cursor, self._fraction) != (split == "validation"):
                continue
            try:
                text = self.files[number].read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            except OSError as error:
                raise ValueError(f"{self.files[number]}: cannot be read ({error.strerror})") from None
            if text.strip():
                yield cursor, text

    def progress(self) -> float:
        return self._number / len(self.files)

    def fingerprint(self) -> dict[str, str]:
        version = ".".join(map(str, sys.version_info[:3]))
        return {"source": f"python-stdlib {version}, held out {self._fraction:g}", "files": fingerprint_files(self.files)}
