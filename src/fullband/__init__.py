"""Latent feedback for language models: train, evaluate and decode full-bandwidth transformers.

    from fullband import FullBandModel, load_tokenizer, generate_text
    model = FullBandModel.load("runs/quickstart/fullband")

Names are imported when they are first used, so `import fullband` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PLACES = {
    "FullBandModel": "fullband.model",
    "Recipe": "fullband.config",
    "attach": "fullband.hf.convert",
    "detach": "fullband.hf.convert",
    "load_recipe": "fullband.config",
    "load_model": "fullband.loading",
    "load_tokenizer": "fullband.data.tokenizers",
    "Connection": "fullband.feedback.connection",
    "Layout": "fullband.layout",
    "multipass": "fullband.feedback.multipass",
    "multipass_loss": "fullband.feedback.loss",
    "states_by_passes": "fullband.feedback.by_passes",
    "top_states": "fullband.feedback.by_passes",
    "prefill": "fullband.decode.prefill",
    "generate": "fullband.decode.engine",
    "generate_text": "fullband.decode.texts",
    "generate_texts": "fullband.decode.texts",
    "train": "fullband.training.loop",
}
__all__ = sorted(_PLACES)

try:
    __version__ = version("fullband")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fullband' has no attribute '{name}'")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
