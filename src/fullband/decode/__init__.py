"""Decoding: read prompts (`prefill`), choose a token (`Sampler`), read it too (`step`), and so on (`stream`, `generate`)."""

from fullband.decode.ahead import Rebuilt, rebuild_cache, score
from fullband.decode.generate import (
    Completion,
    NewText,
    TextCompletion,
    collect,
    generate,
    generate_text,
    generate_texts,
    stream_texts,
)
from fullband.decode.history import TextSoFar
from fullband.decode.modes import Mode, ModeName, resolve_mode, step
from fullband.decode.options import GenerateOptions, LogitProcessor, Settings
from fullband.decode.prefill import SharedPrefix, prefill, prefill_after, prefill_converged, prefill_prefix, prefill_with_states
from fullband.decode.sampling import Sampler, SamplingOptions
from fullband.decode.speculate import Speculation, SpeculationReport
from fullband.decode.steps import FinishReason, NewTokens, TokenStream, stream, stream_from

__all__ = [
    "Completion",
    "FinishReason",
    "GenerateOptions",
    "LogitProcessor",
    "Mode",
    "ModeName",
    "NewText",
    "NewTokens",
    "Rebuilt",
    "Sampler",
    "SamplingOptions",
    "Settings",
    "SharedPrefix",
    "Speculation",
    "SpeculationReport",
    "TextCompletion",
    "TextSoFar",
    "TokenStream",
    "collect",
    "generate",
    "generate_text",
    "generate_texts",
    "prefill",
    "prefill_after",
    "prefill_converged",
    "prefill_prefix",
    "prefill_with_states",
    "rebuild_cache",
    "resolve_mode",
    "score",
    "step",
    "stream",
    "stream_from",
    "stream_texts",
]
