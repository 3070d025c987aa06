"""`generate()` in the modes of section 4.2. transformers' loops choose the tokens; the recurrence is `fullband.decode`'s."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerationMode

from fullband.decode.modes import Mode, resolve_mode
from fullband.feedback.connection import Connection
from fullband.feedback_config import FeedbackPasses
from fullband.hf.cache import FeedbackCache
from fullband.hf.config import FullBandConfig
from fullband.hf.output import FullBandOutput
from fullband.hf.processors import on_own_tokens
from fullband.hf.versions import CACHE
from fullband.trunk.decoder import Decoder
from fullband.trunk.huggingface import HuggingFaceTrunk

KEYS = ("latent_feedback_mode", "feedback_passes")
SUPPORTED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
ONE_PATH = "the top state of a position exists only after the one before it was computed"
UNSUPPORTED = {
    GenerationMode.ASSISTED_GENERATION: f"assisted decoding checks a draft in one parallel pass, but with latent feedback {ONE_PATH}",
    GenerationMode.CONTRASTIVE_SEARCH: f"contrastive search runs all candidates at once from a cache without top states; {ONE_PATH}",
    GenerationMode.DOLA_GENERATION: "DoLa contrasts the layers' states, which are not given out while decoding with latent feedback",
}


@dataclass(frozen=True)
class PromptReading:
    """How `forward` runs a whole text without a cache: `length` prompt tokens in the mode's passes, the rest as generated."""

    mode: Mode
    length: int
    chunk: int | None


class FeedbackGeneration(PreTrainedModel, GenerationMixin):
    """`generate` with `latent_feedback_mode` and `feedback_passes`, as arguments or in the generation config.

    The plain mode of a Hugging Face trunk is that model's own `generate`, with all it can do.
    """

    config: FullBandConfig
    trunk: HuggingFaceTrunk | Decoder
    connection: Connection
    logits: Callable[[Tensor], Tensor]
    sampled_with_feedback = False  # whether this model has generated with feedback, so that plain scores are not its own

    def decoding_mode(
        self,
        generation_config: GenerationConfig | None = None,
        latent_feedback_mode: str | None = None,
        feedback_passes: FeedbackPasses | None = None,
    ) -> tuple[str, FeedbackPasses | None]:
        """(mode, feedback passes) of the arguments, else of the generation config given, else of the model's, else of its config.
        Passes that are set further back than the mode count only if it is fused and they are not set for another mode."""
        places: list[tuple[str | None, FeedbackPasses | None]] = [(latent_feedback_mode, feedback_passes)]
        places += [(getattr(place, KEYS[0], None), getattr(place, KEYS[1], None)) for place in (generation_config, self.generation_config)]
        places.append((self.config.latent_feedback_mode, None))
        chosen = next(i for i, (name, _) in enumerate(places) if name is not None)
        name = places[chosen][0]
        assert name is not None
        considered = [p for p in places if p[0] in (None, "fused")] if name == "fused" else places[: chosen + 1]
        return name, next((passes for _, passes in considered if passes is not None), None)

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        latent_feedback_mode: str | None = None,
        feedback_passes: FeedbackPasses | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' own, with its arguments, and two more, which the generation config may hold too:

        latent_feedback_mode  standard, soft or fused
        feedback_passes       the fused mode's passes over the prompt: 1, 2, …, "exact" or "converged"

        Raises ValueError in one sentence for what can't work with latent feedback.
        """
        name, passes = self.decoding_mode(generation_config, latent_feedback_mode, feedback_passes)
        mode = resolve_mode(name, passes)
        if isinstance(self.trunk, HuggingFaceTrunk) and not mode.feeds_back:
            source: Any = self.trunk.lm
            if isinstance(kwargs.get("cache", kwargs.get("past_key_values")), FeedbackCache):
                raise ValueError("mode standard goes on from the source model's own cache, not from one with latent feedback; leave it out")
            source.generation_config = _without(self.generation_config)
            given = None if generation_config is None else _without(generation_config)
            return source.generate(inputs, given, *args, **kwargs)
        self._refuse_arguments(kwargs)
        self.sampled_with_feedback = self.sampled_with_feedback or mode.feeds_back
        modes = {KEYS[0]: mode.name, KEYS[1]: mode.feedback_passes}
        return super().generate(inputs, generation_config, *args, **modes, **kwargs)

    def _refuse_arguments(self, arguments: dict[str, Any]) -> None:
        reasons = {
            "custom_generate": "custom_generate brings its own decoding loop, which knows nothing of top states",
            "inputs_embeds": "generate takes input_ids: the fusion mixes each token's embedding with the state before it",
            "position_ids": "generate counts positions from the attention mask; leave position_ids out",
            "negative_prompt_ids": _GUIDANCE,
        }
        for name, reason in reasons.items():
            if arguments.get(name) is not None:
                raise ValueError(reason)
        if arguments.get("assistant_model") is not None:
            raise ValueError(UNSUPPORTED[GenerationMode.ASSISTED_GENERATION])
        if arguments.get("cache_implementation") == "paged":
            raise ValueError(_CONTINUOUS)

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        name, passes = self.decoding_mode(generation_config, *(kwargs.pop(key, None) for key in KEYS))
        theirs: Any = super()
        prepared, model_kwargs = theirs._prepare_generation_config(generation_config, *args, **kwargs)
        mode = resolve_mode(name, passes)
        vars(prepared).update({KEYS[0]: mode.name, KEYS[1]: mode.feedback_passes})
        self._refuse_settings(prepared)
        return prepared, model_kwargs

    def _refuse_settings(self, settings: GenerationConfig) -> None:
        mode = settings.get_generation_mode()
        if mode not in SUPPORTED:
            reason = f"the decoding strategy '{mode.value}' is not written for latent feedback"
            raise ValueError(UNSUPPORTED.get(mode, f"{reason}; use greedy decoding, sampling or beam search"))
        if settings.cache_implementation == "paged":
            raise ValueError(_CONTINUOUS)
        if settings.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation='{settings.cache_implementation}' has no place for the top state that latent feedback carries; "
                "leave it out, or use latent_feedback_mode='standard'"
            )
        if settings.compile_config is not None:
            raise ValueError("compile_config needs a cache of fixed size, which latent feedback has only in fullband.decode.static")
        if settings.output_hidden_states or settings.output_attentions:
            kind = "output_hidden_states" if settings.output_hidden_states else "output_attentions"
            raise ValueError(f"{kind}: layers' states are not given out while decoding with latent feedback; diagnose records them")
        if settings.guidance_scale not in (None, 1, 1.0):
            raise ValueError(_GUIDANCE)

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        theirs: Any = super()
        processors = theirs._get_logits_processor(*args, **kwargs)
        mask = (kwargs.get("model_kwargs") or {}).get("attention_mask")
        return on_own_tokens(processors, kwargs.get("encoder_input_ids"), mask)

    def _validate_generation_mode(self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict[str, Any]) -> None:
        if generation_mode not in SUPPORTED:  # an assistant, which the config does not show
            raise ValueError(UNSUPPORTED[GenerationMode.ASSISTED_GENERATION])
        theirs: Any = super()
        theirs._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> GenerationConfig:
        prompt, context, note = kwargs["input_ids_length"], self.trunk.context, self.trunk.context_note
        if prompt >= context:
            raise ValueError(f"the prompt has {prompt} tokens; the model's context of {context} leaves no room to go on{note}")
        theirs: Any = super()
        prepared = theirs._prepare_generated_length(*args, **kwargs)
        if (asked := prepared.max_length) is not None and asked > context:
            warnings.warn(
                f"generation stops at the model's context of {context} tokens, prompt included; asked for were {asked}{note}",
                stacklevel=4,
            )
            prepared.max_length = context
        return prepared

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        given = model_kwargs.get(CACHE)
        if given is not None and not isinstance(given, FeedbackCache):
            raise ValueError(
                f"a {type(given).__name__} holds no top states; go on with the cache that generate(return_dict_in_generate=True) returned, "
                "or with a fullband.hf.FeedbackCache()"
            )
        if given is None and generation_config.use_cache is not False:
            keys = (generation_config.latent_feedback_mode, generation_config.feedback_passes)
            model_kwargs[CACHE] = FeedbackCache(*keys, resumable=bool(generation_config.return_dict_in_generate))

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> FullBandOutput:
        """Prefill the prompts with the mode's passes; the chunks of `prefill_chunk_size` carry a boundary state for each pass."""
        mask = model_kwargs.get("attention_mask")
        length = getattr(generation_config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
        if length != input_ids.shape[1]:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens, the attention mask {length}: give the whole conversation, "
                "answers included; the cache knows what it holds of it"
            )
        mode = resolve_mode(generation_config.latent_feedback_mode, generation_config.feedback_passes)
        chunk, cache = generation_config.prefill_chunk_size, model_kwargs.get(CACHE)
        if cache is None:  # use_cache=False: every step runs everything again
            model_kwargs["prompt_reading"] = PromptReading(mode, input_ids.shape[1], chunk)
            cache = FeedbackCache(resumable=False)
            top_BD = cache.read_prompts(self, input_ids, mask, mode, chunk)
            return FullBandOutput(logits=self.trunk.head(top_BD)[:, None], states=top_BD[:, None])
        top_BD = cache.read_prompts(self, input_ids, mask, mode, chunk)
        return FullBandOutput(logits=self.trunk.head(top_BD)[:, None], states=top_BD[:, None], **{CACHE: cache})

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(_CONTINUOUS)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(_CONTINUOUS)

    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(_CONTINUOUS)


_GUIDANCE = "classifier-free guidance (guidance_scale) runs a second text without feedback: its scores are another model's"
_CONTINUOUS = "continuous batching keeps paged keys and values only, no top states; give the prompts to generate() as a batch"


def _without(settings: GenerationConfig) -> GenerationConfig:
    """The settings that the source model knows."""
    plain = copy.deepcopy(settings)
    for key in KEYS:
        vars(plain).pop(key, None)
    return plain
