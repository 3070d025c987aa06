"""A file of prompts in, a line of JSON for each completion out: written as it goes, and continued where it was interrupted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from fullband.cli.completions import GenerateRequest, add_reports, converged_json
from fullband.cli.console import json_text
from fullband.cli.progress import BatchProgress
from fullband.decode.speculate import SpeculationReport
from fullband.decode.texts import TextStream


class FileJob:
    """The completions of a file of prompts, prompt by prompt and sample by sample.

    written      completions that are on disk, those of an earlier run included
    tokens       tokens made by this run
    speculation  what self-speculation did in this run
    """

    def __init__(self, request: GenerateRequest, batch_size: int):
        self._request, self._batch_size = request, batch_size
        self.total = len(request.prompts) * request.options.n
        self.written = self.tokens = 0
        self.speculation = SpeculationReport()

    def identity(self, row: int) -> dict[str, Any]:
        """The part of a line that is known before anything is generated, by which an earlier run's line is recognised."""
        request, mode = self._request, self._request.options.resolved_mode
        prompt = request.prompts[row // request.options.n]
        return {
            "id": prompt.id,
            "prompt": prompt.text,
            "sample": row % request.options.n,
            "model": str(request.folder),
            "mode": mode.name,
            "feedback_passes": mode.feedback_passes,
            "settings": request.settings,
        }

    def skip_written(self, path: Path) -> None:
        """Take over the lines that `path` holds; a last one without its end is cut off. A file that is not there holds none.

        Raises ValueError, naming the line, for one that is not this job's.
        """
        content = path.read_bytes() if path.exists() else b""
        *lines, torn = content.split(b"\n")
        for row, line in enumerate(lines):
            where = f"{path}:{row + 1}"
            if row >= self.total:
                raise ValueError(f"{where}: the file has more completions than the {self.total} of this request; choose another --output")
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                raise ValueError(f"{where}: not a completion; remove this line and those after it, or choose another --output")
            for key, ours in self.identity(row).items():
                if found.get(key) != ours:
                    theirs = json.dumps(found.get(key), ensure_ascii=False)
                    raise ValueError(f"{where}: from another run ({key} is {theirs} there, {json.dumps(ours, ensure_ascii=False)} here)")
        if torn:
            os.truncate(path, len(content) - len(torn))
        self.written = len(lines)

    def run(self, file: IO[str], progress: BatchProgress) -> None:
        """Generate what is not written yet, and write each line as soon as it and all before it are complete."""
        request, n, size = self._request, self._request.options.n, self._batch_size
        for start in range(self.written // n, len(request.prompts), size):
            tokens = request.tokens[start : start + size]
            options = replace(request.options, keys=range(start, start + len(tokens)))  # the draws of a prompt depend on its number
            stream = TextStream(request.model, request.tokenizer, tokens, options)
            watch = progress.of_batch(start * n, stream.rows)
            for row, completion in enumerate(stream.completions(watch), start=start * n):
                self.tokens += len(completion.tokens)
                if row < self.written:
                    continue  # of a prompt whose other samples are missing
                record = self.identity(row) | {
                    "text": completion.text,
                    "tokens": len(completion.tokens),
                    "finish_reason": completion.finish_reason,
                }
                if stream.converged is not None:
                    record["converged"] = converged_json(stream.converged, row // n - start)
                file.write(json_text(record, file) + "\n")
                file.flush()
                self.written += 1
            self.speculation = add_reports(self.speculation, stream.speculation)


def check_output(path: Path, resume: bool) -> None:
    """Raises ValueError if the lines could not be written there, before anything takes time."""
    check_writable(path)
    if path.exists() and path.stat().st_size and not resume:
        raise ValueError(f"{path}: already exists; continue it with --resume, or choose another --output")


def check_writable(path: Path) -> None:
    """Raises ValueError if a file cannot be written there."""
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path}: no permission to write this file")


@contextmanager
def open_output(path: Path | None) -> Iterator[IO[str]]:
    """The file, for appending; stdout for None. An OSError while it is written names it."""
    if path is None:
        yield sys.stdout
        return
    try:
        with open(path, "a", encoding="utf-8", newline="\n") as file:
            yield file
    except OSError as error:
        if error.strerror and error.filename is None and not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
