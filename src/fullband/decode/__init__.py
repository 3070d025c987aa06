"""Decoding: read prompts (`prefill`), choose a token (`Sampler`), read it too (`step`), and so on (`stream`, `generate`)."""

from fullband.decode.generate import Completion, NewTokens, TextCompletion, generate, generate_text, stream
from fullband.decode.modes import Mode, ModeName, resolve_mode, step
from fullband.decode.prefill import prefill, prefill_with_states
from fullband.decode.sampling import Sampler

__all__ = [
    "Completion",
    "Mode",
    "ModeName",
    "NewTokens",
    "Sampler",
    "TextCompletion",
    "generate",
    "generate_text",
    "prefill",
    "prefill_with_states",
    "resolve_mode",
    "step",
    "stream",
]
