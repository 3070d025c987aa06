"""Run a part of a Hugging Face stack: the layers of the other part hand on what they are given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def passing_over(layers: Iterable[nn.Module], in_tuples: bool, x_BTD: Tensor | None = None) -> Iterator[None]:
    """While the block runs, these layers compute nothing: each returns the residual stream that it is given, or `x_BTD`, alone or in a
    tuple.

    They are not checkpointed either: what autograd would run again after the block is not them.
    """

    def handed(hidden_states: Tensor, *others: Any, **more: Any) -> Any:
        x = hidden_states if x_BTD is None else x_BTD
        return (x, None, None) if in_tuples else x

    changed: list[tuple[Any, Any]] = []
    try:
        layer: Any
        for layer in layers:
            changed.append((layer, getattr(layer, "gradient_checkpointing", None)))
            layer.forward = handed
            if changed[-1][1]:
                layer.gradient_checkpointing = False
        yield
    finally:
        for layer, checkpointing in changed:
            del layer.forward  # the class's own again
            if checkpointing:
                layer.gradient_checkpointing = checkpointing
