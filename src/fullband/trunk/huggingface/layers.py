"""One layer's past, as transformers reads and extends it, and as an immutable value between its calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from fullband.trunk.cache import Slots, joined


@dataclass(frozen=True)
class AttentionPast:
    """Keys and values [B, heads, slots, head dim] of the last slots of `length`; `window` = keys a query sees, its own included."""

    length: int
    window: int | None
    keys: Slots | None = None
    values: Slots | None = None

    @property
    def held(self) -> int:
        return 0 if self.keys is None else len(self.keys)

    @property
    def tensors(self) -> list[Tensor]:
        return [] if self.keys is None or self.values is None else [self.keys.tensor, self.values.tensor]

    def append(self, keys: Tensor, values: Tensor) -> AttentionPast:
        held_keys = Slots.of(keys, -2) if self.keys is None else self.keys.append(keys)
        held_values = Slots.of(values, -2) if self.values is None else self.values.append(values)
        return replace(self, length=self.length + keys.shape[-2], keys=held_keys, values=held_values)

    def crop(self, length: int) -> AttentionPast:
        """Raises ValueError if keys that the next query would need are forgotten."""
        first = self.length - self.held
        oldest_needed = 0 if self.window is None else max(0, length - self.window + 1)
        if first > oldest_needed:
            raise ValueError(f"cannot crop to {length} slots: a sliding layer kept only slots {first} and later (use keep='all')")
        return self._with(length, lambda slots: slots.narrow(0, length - first))

    def rollback(self, length: int) -> AttentionPast:
        self.crop(length)
        return self._with(length, lambda slots: slots.rollback(len(slots) - (self.length - length)))

    def trim(self) -> AttentionPast:
        window = self.window
        return self if window is None else self._with(self.length, lambda slots: slots.last(window - 1))

    def select(self, rows: Tensor) -> AttentionPast:
        return self._with(self.length, lambda slots: slots.rows(rows, row_dim=0))

    def join(self, others: list[AttentionPast], length: int) -> AttentionPast:
        """The rows of all, of `length` slots, zeros before the shorter ones."""
        pasts = [self, *others]
        keys, values = ([getattr(past, name) for past in pasts] for name in ("keys", "values"))
        return replace(self, length=length, keys=joined(keys, row_dim=0), values=joined(values, row_dim=0))

    def gather(self, index_BS: Tensor) -> AttentionPast:
        """Each row's slots in another order. Raises ValueError if some are forgotten."""
        if self.held < self.length:
            raise ValueError("only a cache that keeps all keys (keep='all') can be aligned")

        def gathered(slots: Slots) -> Slots:
            return Slots.of(slots.tensor.gather(-2, index_BS[:, None, :, None].expand(slots.tensor.shape)), -2)

        return self._with(self.length, gathered)

    def _with(self, length: int, change: Any) -> AttentionPast:
        keys, values = (None if slots is None else change(slots) for slots in (self.keys, self.values))
        return replace(self, length=length, keys=keys, values=values)


class AttentionLayer(DynamicLayer):
    """A transformers cache layer over an `AttentionPast`: updating makes a new past, a decoding step copies no keys."""

    def __init__(self, past: AttentionPast):
        super().__init__()
        self.past = past
        self.is_sliding = past.window is not None  # transformers sizes the mask of its sliding layers by the first layer that says so
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.past = self.past.append(key_states, value_states)
        keys, values = self.past.tensors
        return keys, values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.past.held + int(query_length), self.past.length - self.past.held

    def get_seq_length(self, *args: Any) -> int:
        return self.past.length


class RecurrentPast:
    """The past of a layer that carries a recurrent or convolution state: a transformers cache layer that is never changed.

    transformers writes into such a layer, so it is lent a copy: the states cloned (differentiably), keys and values shared, which it
    replaces by longer ones. The copy takes a new recurrent state in place of the old one, not into it: backward needs both.
    """

    def __init__(self, layer: Any):
        self._layer = layer

    def layer(self) -> Any:
        """A copy for transformers to extend."""
        layer = self._changed(torch.clone)
        layer.update_recurrent_state = partial(_replace_recurrent_state, layer)
        return layer

    def after(self, layer: Any, padded_B: Tensor | None) -> RecurrentPast:
        """The past of a `layer` that was lent and has run since. Rows whose slots ended in padding (True) remember what they did before:
        transformers masks padding out of the states, but not where it stands alone, in a step of one token."""
        if padded_B is not None:
            for states, old_states in zip(_states(layer), _states(self._layer), strict=True):
                for i, new in states.items():
                    if isinstance(new, Tensor):
                        old = old_states[i]
                        before = old if isinstance(old, Tensor) else torch.zeros_like(new)
                        states[i] = torch.where(padded_B.view(-1, *[1] * (new.dim() - 1)), before, new)
        return RecurrentPast(layer)

    @property
    def tensors(self) -> list[Tensor]:
        held = [value for states in _states(self._layer) for value in states.values()]
        held += [getattr(self._layer, name, None) for name in ("keys", "values")]
        return [value for value in held if isinstance(value, Tensor)]

    def select(self, rows: Tensor) -> RecurrentPast:
        layer = self._changed(lambda state: state.index_select(0, rows))
        for name in ("keys", "values"):
            if isinstance(getattr(layer, name, None), Tensor):
                setattr(layer, name, getattr(layer, name).index_select(0, rows))
        return RecurrentPast(layer)

    def join(self, others: list[RecurrentPast], length: int) -> RecurrentPast:
        """The rows of all; keys and values, of layers that have them too, with zeros before the shorter ones."""
        pasts = [self, *others]
        layer = self._changed(lambda state: state)
        for own, *rest in zip(_states(layer), *(_states(past._layer) for past in others), strict=True):
            own.update({i: torch.cat([state, *(more[i] for more in rest)]) for i, state in own.items() if isinstance(state, Tensor)})
        for name in ("keys", "values"):
            held: list[Any] = [getattr(past._layer, name, None) for past in pasts]
            if all(isinstance(tensor, Tensor) for tensor in held):
                setattr(layer, name, joined([Slots.of(tensor, -2) for tensor in held], row_dim=0).tensor)
        return RecurrentPast(layer)

    def trim(self) -> RecurrentPast:
        return self

    def crop(self, length: int) -> RecurrentPast:
        raise ValueError("a cache with recurrent layers cannot be cut back, as self-speculation and converged passes would")

    rollback = crop

    def gather(self, index_BS: Tensor) -> RecurrentPast:
        raise ValueError("a cache with recurrent layers cannot be aligned; pad prompts on the left")

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Any:
        """A copy with other states."""
        layer = copy.copy(self._layer)
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, {key: change(part) if isinstance(part, Tensor) else part for key, part in value.items()})
        return layer


def _replace_recurrent_state(layer: Any, state: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
    if not layer.is_recurrent_states_initialized[state_idx]:
        layer.lazy_initialization(recurrent_states=state, state_idx=state_idx)
    layer.recurrent_states[state_idx] = state
    return state


def _states(layer: Any) -> list[dict[int, Tensor | None]]:
    return [layer.conv_states, layer.recurrent_states]
