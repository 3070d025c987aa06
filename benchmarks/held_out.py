"""Texts for benchmarks on a trained model: what tiny-text's recipe holds out of the running interpreter's own library."""

from __future__ import annotations

from fullband.config import PythonStdlibSource
from fullband.data.build import build_source


def held_out_documents() -> list[str]:
    """The validation documents, in the order of their paths."""
    return [text for _, text in build_source(PythonStdlibSource()).documents("validation")]
