"""Files as their uncompressed bytes: plain, .gz of one or more members, .zst of one or more frames and of any window."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import IO, Any, cast

from fullband.data.optional import optional

COMPRESSIONS = (".gz", ".zst")
LONGEST_WINDOW = 2**31  # bytes: the most that `zstd --long=31` makes. Only a frame that asks for it takes the memory


def open_bytes(file: Path) -> IO[bytes]:
    """The uncompressed bytes."""
    if file.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    if file.suffix.lower() == ".zst":
        return io.BufferedReader(_ZstdReader(file), buffer_size=2**20)
    return file.open("rb")


def bytes_read(stream: IO[bytes]) -> int:
    """How far `open_bytes` has come in the file itself, whose bytes may be compressed."""
    inner = getattr(stream, "raw", stream)
    return int(getattr(inner, "compressed", getattr(inner, "fileobj", inner)).tell())


class _ZstdReader(io.RawIOBase):
    """Uncompressed bytes of a .zst file of one or more frames. (zstandard's own reader takes a cut short file for a whole one.)"""

    def __init__(self, file: Path) -> None:
        self._zstandard = optional("zstandard", f"{file}: zst")
        self.compressed = file.open("rb")
        self._frame = self._new_frame()
        self._frame_is_new = True
        self._ready = memoryview(b"")

    def _new_frame(self) -> Any:
        return self._zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW).decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            data = data or self.compressed.read(2**17)
            if self._frame.eof and data:
                self._frame, self._frame_is_new = self._new_frame(), True
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
        self.compressed.close()
        super().close()
