"""Latent feedback for language models: train, evaluate and decode full-bandwidth transformers.

    from fullband import FullBandModel, load_tokenizer, generate_text
    model = FullBandModel.load("runs/quickstart/fullband")

Names are imported when they are first used, so `import fullband` costs nothing.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; _PLACES is the same for the interpreter (tests/test_api.py)
    from fullband.config import Recipe, TrunkConfig, load_recipe
    from fullband.data.batch import Batch
    from fullband.data.tokenizers import load_tokenizer
    from fullband.decode.answers import answer_logprobs
    from fullband.decode.engine import generate
    from fullband.decode.options import GenerateOptions
    from fullband.decode.prefill import prefill
    from fullband.decode.texts import generate_text, generate_texts
    from fullband.feedback.by_passes import states_by_passes, top_states
    from fullband.feedback.connection import Connection
    from fullband.feedback.loss import multipass_loss
    from fullband.feedback.multipass import multipass
    from fullband.feedback.schedule import PassSchedule
    from fullband.feedback.scheduled import run_scheduled_passes
    from fullband.feedback_config import ConnectionConfig, FeedbackConfig, Phase
    from fullband.hf.convert import attach, detach
    from fullband.layout import Layout
    from fullband.loading import load_model
    from fullband.model import FullBandModel, ModelOutput
    from fullband.optim.optimizer import Optimizer
    from fullband.training.loop import train

_PLACES = {
    "Batch": "data.batch",
    "Connection": "feedback.connection",
    "ConnectionConfig": "feedback_config",
    "FeedbackConfig": "feedback_config",
    "FullBandModel": "model",
    "GenerateOptions": "decode.options",
    "Layout": "layout",
    "ModelOutput": "model",
    "Optimizer": "optim.optimizer",
    "PassSchedule": "feedback.schedule",
    "Phase": "feedback_config",
    "Recipe": "config",
    "TrunkConfig": "config",
    "answer_logprobs": "decode.answers",
    "attach": "hf.convert",
    "detach": "hf.convert",
    "generate": "decode.engine",
    "generate_text": "decode.texts",
    "generate_texts": "decode.texts",
    "load_model": "loading",
    "load_recipe": "config",
    "load_tokenizer": "data.tokenizers",
    "multipass": "feedback.multipass",
    "multipass_loss": "feedback.loss",
    "prefill": "decode.prefill",
    "run_scheduled_passes": "feedback.scheduled",
    "states_by_passes": "feedback.by_passes",
    "top_states": "feedback.by_passes",
    "train": "training.loop",
}
__all__ = [
    "Batch",
    "Connection",
    "ConnectionConfig",
    "FeedbackConfig",
    "FullBandModel",
    "GenerateOptions",
    "Layout",
    "ModelOutput",
    "Optimizer",
    "PassSchedule",
    "Phase",
    "Recipe",
    "TrunkConfig",
    "answer_logprobs",
    "attach",
    "detach",
    "generate",
    "generate_text",
    "generate_texts",
    "load_model",
    "load_recipe",
    "load_tokenizer",
    "multipass",
    "multipass_loss",
    "prefill",
    "run_scheduled_passes",
    "states_by_passes",
    "top_states",
    "train",
]

try:
    __version__ = version("fullband")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fullband' has no attribute '{name}'")
    return getattr(import_module(f"fullband.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
