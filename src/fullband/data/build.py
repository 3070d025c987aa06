"""From the `data` section of a recipe to what it names: a text source, a loader."""

from __future__ import annotations

from fullband.config import (
    ChatSource,
    DataConfig,
    FilesSource,
    HuggingFaceSource,
    ProgramTextSource,
    PythonStdlibSource,
    ShardsSource,
    TaskSource,
)
from fullband.data.chat_loader import ChatLoader
from fullband.data.files import Files
from fullband.data.huggingface import HuggingFace
from fullband.data.loader import Loader, TaskLoader, TextLoader
from fullband.data.program_text import ProgramText
from fullband.data.python_stdlib import PythonStdlib
from fullband.data.shard_loader import ShardLoader
from fullband.data.sources import TextSource
from fullband.data.tasks import build_task
from fullband.data.tokenizers import load_tokenizer


def build_loader(config: DataConfig, seed: int, batch_rows: int, rank: int = 0, world: int = 1) -> Loader:
    """The loader of a recipe's `data`; a task brings its own tokenizer.

    Raises ValueError, in one line, for missing or empty files, packages, tokenizers, and a batch that ranks can't share.
    """
    if isinstance(config.source, TaskSource):
        return TaskLoader(build_task(config.source), config.length, seed, batch_rows, rank, world)
    tokenizer = load_tokenizer("bytes" if config.tokenizer == "auto" else config.tokenizer)
    if isinstance(config.source, ChatSource):
        return ChatLoader(config, config.source, tokenizer, seed, batch_rows, rank, world)
    if isinstance(config.source, ShardsSource):
        return ShardLoader(config, config.source, tokenizer, seed, batch_rows, rank, world)
    source = build_source(config.source)
    return TextLoader(source, tokenizer, config.length, seed, batch_rows, config.shuffle_documents, rank, world, config.packing)


def build_source(config: FilesSource | HuggingFaceSource | PythonStdlibSource | ProgramTextSource) -> TextSource:
    """The text source of a recipe. ValueError for missing files, packages or data sets."""
    if isinstance(config, FilesSource):
        return Files(config)
    if isinstance(config, HuggingFaceSource):
        return HuggingFace(config)
    if isinstance(config, ProgramTextSource):
        return ProgramText(config)
    return PythonStdlib(config)
