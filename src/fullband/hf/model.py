"""FullBandForCausalLM: the trunk and the fusion with transformers' interface."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache as TransformersCache

from fullband.feedback.connection import Connection, connect, rename_older
from fullband.hf.cache import FeedbackCache
from fullband.hf.checkpoint import SavedModel
from fullband.hf.config import FullBandConfig
from fullband.hf.evaluation import run_as_generated, run_text
from fullband.hf.fused_head import Backbone, keep_passes
from fullband.hf.generation import FeedbackGeneration, PromptReading
from fullband.hf.inputs import refuse_auxiliary_loss, refuse_ignored
from fullband.hf.output import FullBandOutput
from fullband.hf.packing import describe_rows, shifted_targets
from fullband.hf.progress import StepCounter
from fullband.hf.training import training_forward
from fullband.hf.versions import CACHE
from fullband.trunk.decoder import Decoder
from fullband.trunk.huggingface import HuggingFaceTrunk


class FullBandForCausalLM(SavedModel, FeedbackGeneration, GenerationMixin):
    """A `feedback.passes.FeedbackModel` (it has `trunk` and `connection`) that is a transformers model too.

    Everything of fullband takes it: training, evaluation, decoding.
    """

    config_class = FullBandConfig
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True  # whether the trunk does, it says itself when it is made
    _no_split_modules = ["Block", "Connection"]  # noqa: RUF012  (transformers' own type)
    _keep_in_fp32_modules_strict = ["embedding_scale"]  # noqa: RUF012
    _keys_to_ignore_on_load_missing = [r"^progress\.step$"]  # noqa: RUF012  (only training has it)
    supports_gradient_checkpointing = True
    warned_of_plain_scores = False
    config: FullBandConfig
    trained_without_labels = False  # whether that was warned about
    trunk: HuggingFaceTrunk | Decoder
    connection: Connection

    def __init__(self, config: FullBandConfig, lm: PreTrainedModel | None = None):
        """`lm`: the Hugging Face model to use as the trunk as it is; None = a new one of the config's shape."""
        super().__init__(config)
        eps = 1e-6
        if config.trunk_config is None:
            self.trunk = Decoder(config.native_trunk)
            eps = config.native_trunk.norm_eps
        else:
            lm = lm if lm is not None else AutoModelForCausalLM.from_config(config.trunk_config)
            config.trunk_config = lm.config  # one object: what changes the trunk later (a larger vocabulary) is saved too
            self.trunk = HuggingFaceTrunk(lm, config.adaptation)
        self.connection = Connection(config.connected, self.trunk.width, len(self.trunk.layers), eps)
        connect(self.trunk, self.connection)
        self.progress = StepCounter()
        self.register_load_state_dict_pre_hook(rename_older)
        self.post_init()
        if lm is not None:
            self._inherit(lm)

    def _inherit(self, lm: PreTrainedModel) -> None:
        """What transformers gathers from children that are its own models; here one lies a level deeper."""
        self.all_tied_weights_keys.update({f"trunk.lm.{k}": f"trunk.lm.{v}" for k, v in lm.all_tied_weights_keys.items()})
        self._keys_to_ignore_on_save = {*(self._keys_to_ignore_on_save or ()), *(f"trunk.lm.{k}" for k in lm._keys_to_ignore_on_save or ())}
        for name in (
            "_keep_in_fp32_modules",
            "_keep_in_fp32_modules_strict",
            "_no_split_modules",
            "_skip_keys_device_placement",
            "_keys_to_ignore_on_load_unexpected",
            "_keys_to_ignore_on_load_missing",
        ):
            getattr(self, name).update(getattr(lm, name) or ())

    def __setattr__(self, name: str, value: Any) -> None:
        """A trainer that replaces `forward` keeps the passes (`keep_passes`)."""
        kept: Any = keep_passes(self, value) if name == "forward" else value
        super().__setattr__(name, kept)

    @property
    def base_model(self) -> Any:
        """Tokens to top states, for trainers with a head of their own."""
        if "_backbone" not in self.__dict__:
            self.__dict__["_backbone"] = Backbone(self)
        return self.__dict__["_backbone"]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: TransformersCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        past_key_values: TransformersCache | None = None,
        return_dict: bool | None = None,
        prompt_reading: PromptReading | None = None,
        **kwargs: Any,
    ) -> FullBandOutput | tuple[Any, ...]:
        """Logits [B, T, V] of every position, and with `labels` [B, T] the loss.

        In training with labels: Eq. 12 (`training_forward`). With a `FeedbackCache`: its first call prefills prompts (only their last
        positions have logits), later ones generated tokens. Else the texts are run with `config.feedback_passes`; with 0 a Hugging Face
        trunk is the source model itself, with all its arguments. `config.score_as_generated` runs texts without labels as `generate`
        makes them. Arguments that say something and would be ignored with feedback are refused by name (`hf.inputs`).

        attention_mask   [B, T], 0 = padding on either side; with 0 passes, whatever the source takes
        position_ids     [B, T]; with feedback passes, every 0 starts a document; with a `FeedbackCache` positions are counted from the mask
        logits_to_keep   only the last n positions' logits, or those of the given indices; 0 = all
        prompt_reading   `generate`'s own, without a cache
        Raises ValueError in one sentence for what does not go together.
        """
        cache = cache if cache is not None else past_key_values
        keep_all = return_dict is None or return_dict
        decodes = isinstance(cache, FeedbackCache) or prompt_reading is not None
        trains = not decodes and self.training and labels is not None
        generated = not decodes and labels is None and self.config.score_as_generated
        if not (decodes or trains or generated or self.config.feedback_passes) and isinstance(self.trunk, HuggingFaceTrunk):
            given: dict[str, Any] = {
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "inputs_embeds": inputs_embeds,
                CACHE: cache,
            }
            given |= {"labels": labels, "use_cache": use_cache, "num_items_in_batch": num_items_in_batch, **kwargs}
            return self._plain(input_ids, given | {"logits_to_keep": logits_to_keep, "return_dict": keep_all})
        caches = {"labels": labels} if decodes else {"cache": cache, "use_cache": use_cache}
        refuse_ignored(self.trunk, kwargs | caches, packed=position_ids is not None)
        tokens_BT = self._tokens(input_ids, inputs_embeds)
        if labels is not None:
            refuse_auxiliary_loss(self.trunk)
        if decodes:
            output = self._decode(tokens_BT, attention_mask, cache, prompt_reading, logits_to_keep)
        elif trains:
            output = training_forward(self, tokens_BT, attention_mask, position_ids, labels, num_items_in_batch, logits_to_keep)
        else:
            if generated:
                states_BTD = run_as_generated(self, tokens_BT, logits_to_keep, attention_mask, position_ids)
            else:
                if not self.config.feedback_passes:
                    self._warn_of_plain_scores()
                states_BTD = run_text(self, tokens_BT, self.config.feedback_passes, attention_mask, position_ids)
            output = FullBandOutput(logits=self.trunk.head(_kept(states_BTD, logits_to_keep)), states=states_BTD)
            if labels is not None:
                output.loss = self._loss(output["logits"], labels, attention_mask, position_ids, num_items_in_batch, logits_to_keep)
        return output if keep_all else output.to_tuple()

    def _plain(self, input_ids: Tensor | None, given: dict[str, Any]) -> FullBandOutput | tuple[Any, ...]:
        """The source model itself, with all its arguments."""
        self._warn_of_plain_scores()
        self._warn_of_plain_training(given["labels"])
        source: Any = self._source("arguments of the source")
        return source(input_ids, **{name: value for name, value in given.items() if value is not None})

    def _loss(
        self,
        logits_BTV: Tensor,
        labels_BT: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        scored: Tensor | int | None,
        logits_to_keep: int | Tensor,
    ) -> Tensor:
        """Mean cross-entropy in nats of the labels, or their sum / `scored`; a document's first token has nothing to be predicted from."""
        documents_BT = describe_rows(labels_BT, attention_mask, position_ids).documents_BT
        targets_BT = _kept(shifted_targets(labels_BT, documents_BT), logits_to_keep).contiguous()
        return self.loss_function(logits_BTV, None, self.trunk.vocab_size, num_items_in_batch=scored, shift_labels=targets_BT)

    def _decode(
        self,
        tokens_BT: Tensor,
        attention_mask: Tensor | None,
        cache: TransformersCache | None,
        prompt: PromptReading | None,
        logits_to_keep: int | Tensor,
    ) -> FullBandOutput:
        """A prompt gives the logits of its last position only, generated tokens those of each."""
        held, given = cache, tokens_BT
        if prompt is not None:
            held = FeedbackCache(resumable=False)
            mask = None if attention_mask is None else attention_mask[:, : prompt.length]
            held.read_prompts(self, tokens_BT[:, : prompt.length], mask, prompt.mode, prompt.chunk)
            given = tokens_BT[:, prompt.length :]
        assert isinstance(held, FeedbackCache)
        is_prompt = held.state is None
        states_BTD = held.read_prompts(self, tokens_BT, attention_mask)[:, None] if is_prompt else held.read_tokens(self, given)
        handed_on: dict[str, Any] = {} if cache is None else {CACHE: cache}
        return FullBandOutput(logits=self.trunk.head(_kept(states_BTD, logits_to_keep)), states=states_BTD, **handed_on)

    def _tokens(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if input_ids is None or inputs_embeds is not None:
            where = "" if inputs_embeds is None else "; inputs_embeds are for a Hugging Face trunk with feedback_passes=0"
            raise ValueError(f"input_ids are needed: the fusion mixes each token's embedding with the state before it{where}")
        return input_ids

    def _warn_of_plain_scores(self) -> None:
        if self.sampled_with_feedback and not self.warned_of_plain_scores:
            self.warned_of_plain_scores = True
            warnings.warn(
                "texts that were generated with latent feedback are scored without it (config.feedback_passes=0): these are not the "
                "probabilities with which they were generated; config.score_as_generated=True gives those",
                stacklevel=3,
            )

    def _warn_of_plain_training(self, labels: Tensor | None) -> None:
        if self.training and labels is None and torch.is_grad_enabled() and not self.trained_without_labels:
            self.trained_without_labels = True
            warnings.warn(
                "in training, forward without labels takes no feedback passes (config.feedback_passes=0): feedback is not trained; leave "
                "the loss to forward(labels=), without label smoothing or a loss function of your own",
                stacklevel=3,
            )

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """Trunk and fusion initialise themselves; a model that was never trained here begins at step 0."""
        if isinstance(module, StepCounter):
            init.zeros_(module.step)

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.lm.get_input_embeddings() if isinstance(self.trunk, HuggingFaceTrunk) else self.trunk.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Raises ValueError for an App. A decoder, whose embedding is its head."""
        self._source("new embeddings").set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None for an App. A decoder, whose embedding is its head."""
        return self.trunk.lm.get_output_embeddings() if isinstance(self.trunk, HuggingFaceTrunk) else None

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self._source("a new head").set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; fused inputs keep the scale that was measured (`trunk.calibrate` measures again)."""
        resized = self._source("another vocabulary").resize_token_embeddings(new_num_tokens, *args, **kwargs)
        assert isinstance(self.trunk, HuggingFaceTrunk)
        self.trunk.vocab_size = resized.num_embeddings
        return resized

    def _source(self, wish: str) -> PreTrainedModel:
        if not isinstance(self.trunk, HuggingFaceTrunk):
            raise ValueError(f"an App. A decoder takes no {wish}: its shape is its config")
        return self.trunk.lm

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.trunk, Decoder):
            self.trunk.activation_checkpointing = enable
        else:
            super()._set_gradient_checkpointing(enable, *args, **kwargs)


def _kept(values: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The positions whose logits are wanted, of values [B, T, ...]."""
    if isinstance(logits_to_keep, Tensor):
        return values[:, logits_to_keep]
    return values[:, -logits_to_keep:] if logits_to_keep else values
