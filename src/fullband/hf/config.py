"""config.json of a full-bandwidth model, as transformers reads it. Native model folders (App. A) are read as they are."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, get_args

from transformers import AutoConfig, PreTrainedConfig

from fullband.config import TrunkConfig, parse
from fullband.decode.modes import resolve_mode
from fullband.feedback.by_passes import check_feedback_passes
from fullband.feedback_config import ConnectionConfig, FeedbackPasses, FusionName
from fullband.trunk.huggingface import Adaptation


class FullBandConfig(PreTrainedConfig):
    """A trunk, a fusion, and how the model evaluates and decodes.

    trunk                 shape of an App. A decoder (`fullband.config.TrunkConfig`), or
    trunk_config          the config of the Hugging Face model that serves as the trunk; exactly one of the two
    connection            the keys of a recipe's `feedback.connection`: fusion, source, entry, window; `fusion` alone names the fusion
    embedding_multiplier, state_divisor, logit_multiplier, logit_divisor
                          the trunk's own factors, as `check_model` found them (`trunk.huggingface.Adaptation`)
    latent_feedback_mode  standard, soft or fused (§4.2): how `generate` decodes; generation_config.latent_feedback_mode goes before it
    feedback_passes       passes of `forward` in evaluation: 0 = exactly the source, 1, 2, …, "exact", "converged"
    feedback              training: the keys of a recipe's `feedback` section (schedule, jitter, prefix, …)
    training_steps        training: steps of the whole run, which the schedule's phases are fractions of
    training_seed         training: seed of the schedule, the prefixes and the jitter
    score_as_generated    whether `forward` without labels scores texts as `generate` makes them (what a policy's log-probabilities need):
                          `logits_to_keep` = n then says that the last n - 1 tokens are the answer and those before them the prompt
    """

    model_type = "fullband"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache", "states"]  # what Trainer.predict does not gather
    sub_configs: ClassVar[dict[str, Any]] = {"trunk_config": AutoConfig}

    def __init__(
        self,
        trunk: dict[str, Any] | None = None,
        trunk_config: PreTrainedConfig | dict[str, Any] | None = None,
        fusion: str | None = None,
        connection: dict[str, Any] | None = None,
        embedding_multiplier: float = 1.0,
        state_divisor: float = 1.0,
        logit_multiplier: float = 1.0,
        logit_divisor: float = 1.0,
        latent_feedback_mode: str = "soft",
        feedback_passes: FeedbackPasses = 0,
        feedback: dict[str, Any] | None = None,
        training_steps: int | None = None,
        training_seed: int = 0,
        score_as_generated: bool = False,
        **kwargs: Any,
    ):
        if isinstance(trunk_config, dict):
            trunk_config = AutoConfig.for_model(**trunk_config)
        if fusion not in (None, *get_args(FusionName)):
            raise ValueError(f"fusion: '{fusion}' is none of {', '.join(get_args(FusionName))}")
        if (trunk is None) == (trunk_config is None):
            raise ValueError(f"give trunk or trunk_config, {'one of the two' if trunk is None else 'not both'}: a model has one trunk")
        check_feedback_passes(feedback_passes)
        resolve_mode(latent_feedback_mode)
        connection = {"fusion": fusion or "residual", **(connection or {})}
        if trunk is not None:
            trunk = dict(trunk)
            connection.setdefault("source", trunk.pop("fed_back", "top"))
            parse(TrunkConfig, trunk, "config.json: trunk")
        self.connection = parse(ConnectionConfig, connection, "config.json: connection").model_dump()
        self.trunk = trunk
        self.trunk_config = trunk_config
        self.embedding_multiplier, self.state_divisor = embedding_multiplier, state_divisor
        self.logit_multiplier, self.logit_divisor = logit_multiplier, logit_divisor
        self.latent_feedback_mode, self.feedback_passes = latent_feedback_mode, feedback_passes
        self.feedback, self.training_steps, self.training_seed = feedback, training_steps, training_seed
        self.score_as_generated = score_as_generated
        kwargs.setdefault("tie_word_embeddings", True if trunk_config is None else getattr(trunk_config, "tie_word_embeddings", False))
        kwargs.setdefault("attn_implementation", getattr(trunk_config, "_attn_implementation", None))  # else the trunk's would be reset
        kwargs.setdefault("architectures", ["FullBandForCausalLM"])  # which the folder of an App. A model does not name
        if trunk_config is not None:
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                kwargs.setdefault(name, getattr(trunk_config, name, None))
        super().__init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing, as in `checkpoint.SavedModel`."""

    @property
    def connected(self) -> ConnectionConfig:
        """`connection`, typed."""
        return parse(ConnectionConfig, self.connection, "config.json: connection")

    @property
    def native_trunk(self) -> TrunkConfig:
        """The App. A decoder's shape. Raises ValueError if the trunk is a Hugging Face model."""
        if self.trunk is None:
            raise ValueError("this model's trunk is a Hugging Face model, not an App. A decoder")
        return parse(TrunkConfig, self.trunk, "config.json: trunk")

    @property
    def adaptation(self) -> Adaptation:
        """The factors of a Hugging Face trunk."""
        return Adaptation(**{field.name: getattr(self, field.name) for field in fields(Adaptation)})

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> Any:
        """What generation asks for vocabulary, width and layers: the trunk's own text config."""
        return self if self.trunk_config is None else self.trunk_config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        return self.native_trunk.vocab_size if self.trunk_config is None else int(self.get_text_config().vocab_size)

    @property
    def hidden_size(self) -> int:
        return self.native_trunk.width if self.trunk_config is None else int(self.get_text_config().hidden_size)

    @property
    def num_hidden_layers(self) -> int:
        return self.native_trunk.layers if self.trunk_config is None else int(self.get_text_config().num_hidden_layers)

    @property
    def num_attention_heads(self) -> int:
        return self.native_trunk.heads if self.trunk_config is None else int(self.get_text_config().num_attention_heads)

    @property
    def num_key_value_heads(self) -> int:
        if self.trunk_config is None:
            return self.native_trunk.kv_heads
        return int(getattr(self.get_text_config(), "num_key_value_heads", None) or self.num_attention_heads)

    @property
    def head_dim(self) -> int:
        if self.trunk_config is None:
            return self.native_trunk.head_size
        return int(getattr(self.get_text_config(), "head_dim", None) or self.hidden_size // self.num_attention_heads)

    @property
    def max_position_embeddings(self) -> int:
        if self.trunk_config is None:
            return self.native_trunk.context
        return int(getattr(self.get_text_config(), "max_position_embeddings", None) or 2**31 - 1)
