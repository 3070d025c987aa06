"""Reachability (Eqs. 2 and 7, Fig. 1): which earlier states can move a state, measured by gradients.

Every block's output h_{t'}^{l'} gets a zero added to it; the gradient of random projections of h_t^l with respect to these zeros says
whether, and how strongly, h_t^l depends on h_{t'}^{l'}. Blocks are the trunk's outermost ModuleList, so the decoder of App. A and
Hugging Face trunks are looked into alike. Layer 0 is the stack's input, layer L the last block's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullband.feedback.passes import FeedbackModel, below, plain_pass, sequential
from fullband.trunk.pointwise import lengths

PROJECTIONS = 2
POSITIONS = 6
LAYERS = 8  # of the stack that are looked at, at most


@dataclass(frozen=True)
class Reach:
    """One mode's grid for the states of the last position.

    mode        standard, or soft after a prompt without feedback of `prompt` positions
    carried     the layer c whose state is fed back: L, unless the trunk hands on that of a lower one
    layers      the layers looked at, counted from 0 (the stack's input) to L
    influence   [target layer][source position][source layer]: ‖∂(w·h_t^l)/∂h_{t'}^{l'}‖·‖h_{t'}^{l'}‖ / ‖h_t^l‖, w of unit norm, mean over
                projections; exactly 0 = unreachable. t is the last position; its own column is included
    unexpected  how many past states (t' < t) break Eq. 2 in Standard (l' >= l reached) or Eq. 7 in Soft (a state that it says is reached,
                and a plain prompt does not hide, is not; or one that it says is not, is)
    """

    mode: str
    prompt: int
    carried: int
    layers: list[int]
    influence: list[list[list[float]]]
    unexpected: int


def measure_reach(model: FeedbackModel, tokens: Tensor, prompt: int = 3, seed: int = 0) -> list[Reach]:
    """Standard and Soft over one row of LongTensor [T] ids, T > `prompt` >= 1.

    Raises ValueError for other rows, and for a trunk in which no list of blocks is found.
    """
    if tokens.dim() != 1 or not 1 <= prompt < len(tokens):
        raise ValueError(f"reachability takes one row longer than its prompt of {prompt}, not {list(tokens.shape)}")
    blocks = stack_blocks(model.trunk)
    tokens_1T = tokens[None].to(model.trunk.device)
    runs: dict[str, Callable[[], None]] = {
        "standard": lambda: _run_plain(model, tokens_1T),
        "soft": lambda: _run_soft(model, tokens_1T, prompt),
    }
    carried = max(model.connection.sources, default=len(blocks))
    return [_measure(mode, run, blocks, tokens_1T.shape[1], prompt, carried, seed) for mode, run in runs.items()]


def stack_blocks(trunk: Any) -> nn.ModuleList:
    """The blocks of a trunk: its outermost list of modules, the longest if there are several. Raises ValueError if it has none."""
    named = trunk.named_modules() if isinstance(trunk, nn.Module) else []
    lists = [(name.count("."), -len(module), module) for name, module in named if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError("no list of blocks is found in this trunk: what its layers can reach cannot be measured")
    return min(lists, key=lambda found: found[:2])[2]


def _run_plain(model: FeedbackModel, tokens_1T: Tensor) -> None:
    plain_pass(model, below(model, tokens_1T)[0])


def _run_soft(model: FeedbackModel, tokens_1T: Tensor, prompt: int) -> None:
    """A plain prompt, then position by position with feedback (Listing 2), its graph kept."""
    inputs, _ = below(model, tokens_1T)
    state, _ = sequential(model, inputs[:prompt], keep="all", feeds_back=False)
    sequential(model, inputs[prompt:], state, "all")


def _measure(mode: str, run: Callable[[], None], blocks: nn.ModuleList, length: int, prompt: int, carried: int, seed: int) -> Reach:
    depth = len(blocks)
    layers = sorted({round(i * depth / min(LAYERS, depth)) for i in range(min(LAYERS, depth) + 1)})
    with torch.enable_grad(), _recorded(blocks, length) as record:
        run()
    generator = torch.Generator().manual_seed(seed)
    influence = [_influence(record, layer, layers, length, generator) for layer in layers]
    return Reach(mode, prompt, carried, layers, influence, _unexpected(mode, prompt, carried, layers, influence))


class _Record:
    """What the blocks put out, by layer, piece by piece, and the zeros that were added to it."""

    def __init__(self, depth: int):
        self.outputs: list[list[Tensor]] = [[] for _ in range(depth + 1)]
        self.zeros: list[list[Tensor]] = [[] for _ in range(depth + 1)]

    def nudged(self, layer: int, x_1TD: Tensor) -> Tensor:
        zero = torch.zeros_like(x_1TD, requires_grad=True)
        nudged = x_1TD + zero
        self.zeros[layer].append(zero)
        self.outputs[layer].append(nudged)
        return nudged

    def states(self, layer: int) -> Tensor:
        return torch.cat(self.outputs[layer], dim=1)[0]


@contextmanager
def _recorded(blocks: nn.ModuleList, length: int) -> Iterator[_Record]:
    record = _Record(len(blocks))

    def before_first(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (record.nudged(0, arguments[0]), *arguments[1:]), named
        return (), named | {"hidden_states": record.nudged(0, named["hidden_states"])}

    def after(layer: int) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, result: Any) -> Any:
            if isinstance(result, tuple):
                return (record.nudged(layer, result[0]), *result[1:])
            return record.nudged(layer, result)

        return hook

    hooks = [blocks[0].register_forward_pre_hook(before_first, with_kwargs=True)]
    hooks += [block.register_forward_hook(after(layer)) for layer, block in enumerate(blocks, start=1)]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()
    made = record.states(len(blocks)).shape[0]
    assert made == length, f"{made} positions were seen, not {length}"


def _influence(record: _Record, layer: int, layers: list[int], length: int, generator: torch.Generator) -> list[list[float]]:
    """[source position][source layer] for the last position's state of one layer."""
    target_D = record.states(layer)[-1]
    sources = [zero for source in layers for zero in record.zeros[source]]
    found = torch.zeros(length, len(layers), dtype=torch.float64)
    for _ in range(PROJECTIONS):
        weights_D = torch.randn(target_D.shape, generator=generator, dtype=torch.float64).to(target_D.device, target_D.dtype)
        objective = (target_D * (weights_D / lengths(weights_D)).to(target_D.dtype)).sum()
        gradients = iter(torch.autograd.grad(objective, sources, retain_graph=True, allow_unused=True))
        for place, source in enumerate(layers):
            pieces = [(zero, next(gradients)) for zero in record.zeros[source]]
            whole = torch.cat([torch.zeros_like(zero) if gradient is None else gradient for zero, gradient in pieces], dim=1)[0]
            scale_T = lengths(record.states(source).detach()) / lengths(target_D.detach())
            found[:, place] += (lengths(whole) * scale_T).double().cpu() / PROJECTIONS
    return [list(row) for row in found.tolist()]


def _unexpected(mode: str, prompt: int, carried: int, layers: list[int], influence: list[list[list[float]]]) -> int:
    count = 0
    for target, grid in zip(layers, influence, strict=True):
        for position, row in enumerate(grid[:-1]):
            for source, value in zip(layers, row, strict=True):
                if mode == "standard":
                    count += source >= target and value > 0
                else:  # the carried states of a plain prompt are fed back only at its end
                    fed = source <= carried if position >= prompt - 1 else source < carried
                    count += (value > 0) != (source < target or fed)
    return count
