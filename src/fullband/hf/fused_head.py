"""Trainers that put a head of their own over a model, as TRL's do: its passes, and how its answers are scored, are kept.

Such a trainer replaces `model.forward` by a function that, called with `fused_lm_head=True` and labels, runs `model.base_model` and makes
the labels' log-probabilities in chunks. Left alone it would train pass 1 only, and score every text without feedback.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from fullband.data.batch import IGNORE
from fullband.hf.evaluation import run_as_generated, run_text
from fullband.hf.inputs import refuse_auxiliary_loss, refuse_ignored
from fullband.hf.training import TrainedModel, token_objective

if TYPE_CHECKING:
    from collections.abc import Iterator


class ScoredModel(TrainedModel, Protocol):
    """What this needs of `FullBandForCausalLM`."""

    training: bool

    @property
    def base_model(self) -> Any: ...


class Backbone:
    """What `model.base_model(…)` is to such a trainer: tokens to top states [B, T, D], in the config's passes."""

    def __init__(self, model: ScoredModel):
        self._model = model
        self._states: Tensor | None = None

    @property
    def serves(self) -> bool:
        """Whether states are given already."""
        return self._states is not None

    @contextmanager
    def serving(self, states_BTD: Tensor) -> Iterator[None]:
        """Inside, these are the states."""
        self._states = states_BTD
        try:
            yield
        finally:
            self._states = None

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **others: Any
    ) -> BaseModelOutputWithPast:
        """Raises ValueError for arguments that would be ignored (`hf.inputs`)."""
        refuse_ignored(self._model.trunk, others, packed=position_ids is not None)
        if self._states is not None:
            return BaseModelOutputWithPast(last_hidden_state=self._states)
        passes = self._model.config.feedback_passes
        return BaseModelOutputWithPast(last_hidden_state=run_text(self._model, input_ids, passes, attention_mask, position_ids))


def keep_passes(model: ScoredModel, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, which a trainer wants to put in the place of the model's own, with what it does to labels kept ours.

    A method stays a method: accelerate wraps the function inside it.
    """
    if isinstance(forward, MethodType):
        function = forward.__func__

        @wraps(function)
        def method(owner: ScoredModel, *args: Any, **kwargs: Any) -> Any:
            return _with_passes(owner, MethodType(function, owner), args, kwargs)

        return MethodType(method, model)

    @wraps(forward)
    def kept(*args: Any, **kwargs: Any) -> Any:
        return _with_passes(model, forward, args, kwargs)

    return kept


def _with_passes(model: ScoredModel, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    labels = kwargs.get("labels")
    if not kwargs.get("fused_lm_head") or labels is None or model.base_model.serves:
        return forward(*args, **kwargs)
    given = dict(zip(("input_ids", "attention_mask", "position_ids"), args, strict=False)) | kwargs
    tokens, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    refuse_auxiliary_loss(model.trunk)
    if tokens is None:
        return forward(*args, **kwargs)
    if model.config.score_as_generated:
        answer = int((labels != IGNORE).any(dim=0).nonzero()[0])  # slots before it are prompts in every row
        states = run_as_generated(model, tokens, tokens.shape[1] - answer + 1, mask, positions)
        with model.base_model.serving(states):
            return forward(*args, **kwargs)
    if not model.training:
        return forward(*args, **kwargs)
    objective_BT, plain_BTD = token_objective(model, tokens, mask, positions, labels)
    with torch.no_grad(), model.base_model.serving(plain_BTD.detach()):
        output = forward(*args, **kwargs)  # the trainer's own numbers, of pass 1
    output.log_probs = -objective_BT[:, :-1]  # their sum is Eq. 12's objective
    return output
