"""The residual stream at every depth of a trunk, seen and changed through forward hooks on its layers.

Depth 0 is the stack's input (plain or fused), depth d the output of layer d, counted from 1; the final norm comes after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fullband.trunk.protocol import Trunk

Look = Callable[[Tensor], Tensor | None]  # takes a residual stream [B, T, D]; what it returns, if anything, takes its place


@contextmanager
def residuals(trunk: Trunk) -> Iterator[list[list[Tensor]]]:
    """While the block runs, every forward pass appends its residual stream [B, T, D] at each depth to the list of that depth."""
    seen: list[list[Tensor]] = [[] for _ in range(len(trunk.layers) + 1)]
    with ExitStack() as stack:
        for depth, at_depth in enumerate(seen):
            stack.enter_context(watched(trunk, depth, at_depth.append))
        yield seen


@contextmanager
def watched(trunk: Trunk, depth: int, look: Look) -> Iterator[None]:
    """While the block runs, every forward pass shows its residual stream at `depth` to `look`. Raises ValueError for other depths."""
    layers = trunk.layers
    if not 0 <= depth <= len(layers):
        raise ValueError(f"depth {depth} is outside this trunk's 0 … {len(layers)}")
    handle = _at_input(layers[depth], look) if depth < len(layers) else _at_output(layers[-1], look)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def runs_watched(trunk: Any, look: Callable[[Tensor], None]) -> Iterator[None]:
    """While the block runs, `look` gets what enters [B, T, D] after every run of the layers above the entry."""
    above = trunk.above

    def watched_above(x_BTD: Tensor, *others: Any, **more: Any) -> Any:
        output = above(x_BTD, *others, **more)
        look(x_BTD)
        return output

    trunk.above = watched_above
    try:
        yield
    finally:
        del trunk.above  # the class's own again


def _at_input(layer: nn.Module, look: Look) -> RemovableHandle:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        changed = look(arguments[0])
        return None if changed is None else (changed, *arguments[1:])

    return layer.register_forward_pre_hook(hook)


def _at_output(layer: nn.Module, look: Look) -> RemovableHandle:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return look(output)
        changed = look(output[0])
        return None if changed is None else (changed, *output[1:])

    return layer.register_forward_hook(hook)
