"""Prompts from the command line or a file, each with the place a message can point at."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullband.data.tokenizer import Tokenizer
    from fullband.decode.options import GenerateOptions
    from fullband.trunk.protocol import Trunk

STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """`id` is the file's own, or the number of the line; `where` is "file:line", and empty for a prompt of the command line."""

    text: str
    id: int | str = 1
    where: str = ""


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
    from fullband.decode.prompts import align_prompts

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
