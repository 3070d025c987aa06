"""Decoding: prompts (`prompts`) → state (`prefill`) → tokens (`engine`: `stream`, `generate`) → texts (`texts`: `generate_texts`)."""

from fullband.decode.ahead import Rebuilt, rebuild_cache
from fullband.decode.answers import SampledAnswer, answer_logprobs
from fullband.decode.engine import Completion, FinishReason, NewTokens, TokenStream, collect, generate, stream, stream_from
from fullband.decode.modes import Mode, ModeName, resolve_mode, step
from fullband.decode.options import GenerateOptions, GenerateSettings
from fullband.decode.prefill import SharedPrefix, prefill, prefill_after, prefill_converged, prefill_prefix, prefill_with_states
from fullband.decode.sampling import LogitProcessor, Sampler, SamplingOptions, TextSoFar
from fullband.decode.speculate import Speculation, SpeculationReport
from fullband.decode.texts import NewText, TextCompletion, TextStream, generate_text, generate_texts, stream_texts

__all__ = [
    "Completion",
    "FinishReason",
    "GenerateOptions",
    "GenerateSettings",
    "LogitProcessor",
    "Mode",
    "ModeName",
    "NewText",
    "NewTokens",
    "Rebuilt",
    "SampledAnswer",
    "Sampler",
    "SamplingOptions",
    "SharedPrefix",
    "Speculation",
    "SpeculationReport",
    "TextCompletion",
    "TextSoFar",
    "TextStream",
    "TokenStream",
    "answer_logprobs",
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
    "step",
    "stream",
    "stream_from",
    "stream_texts",
]
