"""`fullband tokenize`: text into shards of ids, once, for many runs."""

from __future__ import annotations

import glob
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullband.cli.models import AsJson

if TYPE_CHECKING:
    from fullband.config import DataConfig
    from fullband.data.shards import Manifest
    from fullband.data.tokenize import Watch

EXAMPLES = """Examples:

\b
  fullband tokenize corpus/*.jsonl.gz -o corpus-cl100k --tokenizer tiktoken:cl100k_base
  fullband tokenize HuggingFaceFW/fineweb-edu -o fineweb --tokenizer tokenizer.json --set data.source.name=sample-10BT
  fullband tokenize notes.parquet -o notes --set data.source.text_field=body --set data.source.validation_fraction=0.001
  fullband tokenize paper-200b -o corpus-200b          the data and the tokenizer of a recipe
  fullband tokenize corpus-cl100k --check              hash every file of a folder made before

\b
Then, in a recipe (see fullband recipe data.source):
  data:
    source: {kind: shards, folders: [corpus-cl100k, fineweb], weights: [0.3, 0.7]}

A run that was killed goes on where it was when the same command is given again; finished shards stay as they are.
"""


def tokenize(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files (txt, jsonl, parquet; .gz, .zst; globs), a Hugging Face dataset, python-stdlib, program-text, or a recipe.",
        ),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder to write, or to go on with.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="bytes, program, tiktoken:NAME, or a tokenizer.json (or its folder); default: the recipe's, else bytes."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the data, as in data.source.text_field=body; may be repeated."),
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes that tokenise; default: one for each core.")] = None,
    shard_tokens: Annotated[
        int, typer.Option("--shard-tokens", min=1, help="A shard ends with the document that brings it to so many tokens.")
    ] = 2**24,
    check: Annotated[
        bool, typer.Option("--check", help="Only hash the files of SOURCE, a folder of shards, and name the first that is damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenise text into a folder of shards that training maps into memory.

    Held-out documents become shards of their own. The folder holds the tokenizer, and a manifest with the hash of each file.
    """
    from fullband.cli.console import output as stdout
    from fullband.cli.console import print_json
    from fullband.data.shards import check_hashes, complete_manifest
    from fullband.data.tokenize import tokenize as run

    begun = time.perf_counter()
    if check:
        folder = Path(source[0])
        if len(source) > 1 or output:
            raise ValueError("--check: takes one folder of shards and nothing else")
        manifest, before = complete_manifest(folder), 0
        with shown_progress() as watch:
            done, total = 0, sum(manifest.total(split)["tokens"] for split in manifest.shards)
            for tokens in check_hashes(folder, manifest):
                done += tokens
                watch("checking", done, done / total)
    elif output is None:
        raise ValueError("-o DIR: required, but not given: the folder to write")
    else:
        folder = output
        with shown_progress() as watch:
            manifest, before = run(data_of(source, tokenizer, overrides or []), folder, jobs, shard_tokens, watch)
    found = summary(folder, manifest, before, time.perf_counter() - begun)
    if as_json:
        print_json(found)
    else:
        stdout().print(in_words(found, manifest, check), soft_wrap=True)


def data_of(sources: list[str], tokenizer: str | None, overrides: list[str]) -> DataConfig:
    """The section `data` that the arguments mean. Raises ValueError in one line."""
    from fullband.config import DataConfig, apply_override, load_recipe
    from fullband.data.files import KINDS
    from fullband.shipped import is_recipe
    from fullband.strict import parse
    from fullband.training.resolve import with_tokenizer

    first = sources[0]
    overrides = overrides + ([f"data.tokenizer={tokenizer}"] if tokenizer else [])
    is_file = any(glob.has_magic(place) or Path(place).is_file() or suffixes(place) & KINDS.keys() for place in sources)
    if len(sources) == 1 and is_recipe(first) and (Path(first).suffix in (".yaml", ".yml") or not is_file):
        return with_tokenizer(load_recipe(first, overrides)).data
    if len(sources) > 1 or is_file:
        raw: dict[str, Any] = {"data": {"source": {"kind": "files", "paths": sources}}}
    elif first in ("python-stdlib", "program-text"):
        raw = {"data": {"source": {"kind": first}}}
    else:
        raw = {"data": {"source": {"kind": "huggingface", "dataset": first}}}
    for override in overrides:
        apply_override(raw, override)
    if other := raw.keys() - {"data"}:
        raise ValueError(f"--set {min(other)}: must be a key of data, as in data.source.text_field")
    return parse(DataConfig, raw["data"], "data")


def suffixes(place: str) -> set[str]:
    return {suffix.lower() for suffix in Path(place).suffixes[-2:]}


@contextmanager
def shown_progress() -> Iterator[Watch]:
    """On stderr: a bar with rate and time left in a terminal, a line now and then elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn

    from fullband.amounts import duration, short
    from fullband.cli.console import messages
    from fullband.cli.progress import ProgressLines

    console = messages()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}"), console=console, transient=True
    )
    lines, doing = ProgressLines(console), ""
    task = bar.add_task("", total=1.0, state="")
    start: tuple[float, int, float] = (0.0, 0, 0.0)  # time, tokens and part done when this split began

    def watch(what: str, tokens: int, part: float | None) -> None:
        nonlocal doing, start
        now = time.perf_counter()
        if what != doing or (part is not None and not start[2]):
            start, doing = (now, tokens, part or 0.0), what
        seconds, moved = now - start[0], (part or 0.0) - start[2]
        state = f"{short(tokens)} tokens"
        if seconds > 1 and tokens > start[1]:
            state += f", {short((tokens - start[1]) / seconds)} tokens/s"
        if part is not None:
            state = f"{part:.0%}, {state}"
            if seconds > 1 and moved > 0:
                state += f", {duration(seconds * (1 - part) / moved)} left"
        if not console.is_interactive:
            lines.say(what if what == "checking" else f"tokenising {what}", state)
            return
        bar.update(task, description=what, completed=part or 0.0, total=1.0 if part is not None else None, state=state)
        if not bar.live.is_started:
            bar.start()

    try:
        yield watch
    finally:
        bar.stop()


def summary(folder: Path, manifest: Manifest, before: int, seconds: float) -> dict[str, Any]:
    splits = {split: manifest.total(split) for split in manifest.shards}
    total = sum(split["tokens"] for split in splits.values())
    return {
        "folder": str(folder),
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "splits": splits,
        "tokens": total,
        "tokens_before": before,
        "bytes": manifest.bytes,
        "seconds": seconds,
        "tokens_per_second": (total - before) / seconds,
    }


def in_words(found: dict[str, Any], manifest: Manifest, check: bool) -> str:
    from fullband.amounts import duration, short, size

    splits = "; ".join(
        f"{split} {n['tokens']:,} tokens of {n['documents']:,} documents in {n['shards']} shards" for split, n in found["splits"].items()
    )
    if check:
        done = "every file is as it was written"
    elif found["tokens"] == found["tokens_before"]:
        done = "complete already; nothing was written"
    else:
        done = f"{duration(found['seconds'])}, {short(found['tokens_per_second'])} tokens/s"
        done += f", {short(found['tokens_before'])} tokens were there before" if found["tokens_before"] else ""
    return f"{found['folder']}: {splits} ({size(found['bytes'])}, {manifest.dtype}, {manifest.tokenizer})\n{done}"
