"""Files of prompts in, a line of JSON for each completion out: written as it goes, and continued where it was interrupted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fullband.cli.completions import GenerateRequest, Prompt, add_reports, converged_json
from fullband.cli.console import json_text
from fullband.cli.progress import BatchProgress
from fullband.decode.options import GenerateOptions
from fullband.decode.prompts import align_prompts
from fullband.decode.speculate import SpeculationReport
from fullband.decode.texts import TextStream

if TYPE_CHECKING:
    from fullband.data.tokenizer import Tokenizer
    from fullband.trunk.protocol import Trunk

STDIN = "-"


def read_prompts(source: str, say: Callable[[str], None]) -> list[Prompt]:
    """The prompts of a file, "-" = standard input. Files named .jsonl hold an object a line; others a prompt a line, ends of lines left
    off. Standard input is jsonl if its first line is an object with a prompt. Empty lines are skipped, and `say` names them.

    Raises ValueError, naming the line, for what cannot be read or is no prompt, for an id that occurs twice, and if there are none.
    """
    lines, name = _lines(source)
    jsonl = _is_jsonl(lines) if source == STDIN else Path(source).suffix.lower() in (".jsonl", ".ndjson")
    prompts: list[Prompt] = []
    empty: list[int] = []
    ids: dict[int | str, str] = {}
    for number, raw in enumerate(lines, start=1):
        where = f"{name}:{number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from None
        if not line.strip():
            empty.append(number)
            continue
        prompt = _of_json(line, number, where) if jsonl else Prompt(line, number, where)
        if prompt.id in ids:
            raise ValueError(f"{where}: the id {prompt.id!r} is already used in {ids[prompt.id]}; ids must be unique")
        ids[prompt.id] = where
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{name}: has no prompts; write one per line")
    if empty:
        shown = ", ".join(map(str, empty[:8])) + (" …" if len(empty) > 8 else "")
        say(f"{name}: skipped {len(empty)} empty line{'s' * (len(empty) > 1)} ({shown})")
    return prompts


def tokenize_prompts(prompts: list[Prompt], tokenizer: Tokenizer, trunk: Trunk, options: GenerateOptions) -> list[list[int]]:
    """The tokens of each prompt. Raises ValueError, naming file and line, for the first that cannot be continued as the options ask."""
    cut_to = options.cut_to(trunk.context)
    ids = []
    for prompt in prompts:
        try:
            tokens = tokenizer.begin(prompt.text)
            align_prompts(trunk, [tokens], cut_to=cut_to)
            options.limits([len(tokens)], trunk)
        except ValueError as error:
            place = f"{prompt.where}: " if prompt.where else ""
            raise ValueError(f"{place}{str(error).replace('prompt 0', 'the prompt')}") from None
        ids.append(tokens)
    return ids


def _lines(source: str) -> tuple[list[bytes], str]:
    """(the lines without their ends, the name messages use)."""
    if source == STDIN:
        content, name = sys.stdin.buffer.read(), "standard input"
    else:
        path = Path(source)
        if not path.exists():
            raise ValueError(f"{source}: no such file of prompts")
        content, name = path.read_bytes(), source
    lines = [line.removesuffix(b"\r") for line in content.split(b"\n")]
    return (lines[:-1] if not lines[-1] else lines), name


def _is_jsonl(lines: list[bytes]) -> bool:
    try:
        first = json.loads(next((line for line in lines if line.strip()), b""))
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "prompt" in first


def _of_json(line: str, number: int, where: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg}, column {error.colno}); fix or remove this line") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise ValueError(f"{where}: not valid JSON ({' '.join(str(error).split())}); fix or remove this line") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: must be a JSON object with a field 'prompt', got a {type(record).__name__}")
    if "prompt" not in record:
        raise ValueError(f"{where}: no field 'prompt'; the fields there are {', '.join(record) or 'none'}")
    text, identity = record["prompt"], record.get("id", number)
    if not isinstance(text, str):
        raise ValueError(f"{where}: the field 'prompt' must be text, got {type(text).__name__}")
    if not isinstance(identity, (int, str)) or isinstance(identity, bool):
        raise ValueError(f"{where}: the field 'id' must be a number or text, got {type(identity).__name__}")
    return Prompt(text.encode("utf-8", errors="replace").decode("utf-8"), identity, where)  # JSON can spell half a surrogate pair


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
