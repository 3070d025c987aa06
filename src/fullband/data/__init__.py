"""Data: built-in tasks, text sources, tokenizers, packing, and loaders with exact state."""

from fullband.data.batch import IGNORE, PADDING, Batch, Document, stack
from fullband.data.build import build_loader
from fullband.data.loader import Loader, TaskLoader, TextLoader
from fullband.data.packing import pack_documents
from fullband.data.tasks import Task, build_task
from fullband.data.tokenizer import Tokenizer
from fullband.data.tokenizers import load_tokenizer

__all__ = [
    "IGNORE",
    "PADDING",
    "Batch",
    "Document",
    "Loader",
    "Task",
    "TaskLoader",
    "TextLoader",
    "Tokenizer",
    "build_loader",
    "build_task",
    "load_tokenizer",
    "pack_documents",
    "stack",
]
