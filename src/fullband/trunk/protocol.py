"""What feedback asks of a trunk. Two implementations are meant: the App. A decoder, and any Hugging Face causal LM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fullband.layout import NOWHERE, Layout

Keep = Literal["none", "window", "all"]
Merge = Callable[[Tensor], Tensor]  # residual stream [B, T, D] at a depth -> what takes its place there
CacheT = TypeVar("CacheT", bound="Cache")


class Cache(Protocol):
    """What a trunk remembers of the slots it has run over, of the layers below or above the entry. A value: no operation changes the
    cache that it is asked of.

    length           slots
    fork()           an independent continuation; attention tensors are shared, recurrent states are copied when they are extended
    crop(length)     the cache as it was after `length` slots. ValueError where keys that the next query needs are forgotten, and for
                     recurrent layers
    rollback(length) `crop` of a cache that is not used again: later slots are then overwritten in place
    trim()           sliding layers forget what no later query can see, as with keep="window"
    select(rows_N)   these sequences, in this order: beams, finished sequences that leave
    repeat(times)    every sequence `times` times: one prompt, many continuations
    join(others)     the sequences of several caches as one batch, padded on the left to one length
    align_right(lengths_B)   sequences padded on the right, with the padding moved to the left
    """

    @property
    def length(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def fork(self: CacheT) -> CacheT: ...
    def crop(self: CacheT, length: int) -> CacheT: ...
    def rollback(self: CacheT, length: int) -> CacheT: ...
    def trim(self: CacheT) -> CacheT: ...
    def select(self: CacheT, rows: Tensor) -> CacheT: ...
    def repeat(self: CacheT, times: int) -> CacheT: ...
    def join(self: CacheT, others: list[CacheT]) -> CacheT: ...
    def align_right(self: CacheT, lengths_B: Tensor) -> CacheT: ...


class LowerOutput(NamedTuple):
    """`x_BTD` is the residual stream at the entry; `carried` the streams at the source depths below it; `cache` None where there is
    nothing below, or nothing was to be kept."""

    x_BTD: Tensor
    carried: tuple[Tensor, ...]
    cache: Any


class TrunkOutput(NamedTuple):
    """`top_BTD` is the state after the final norm, [B, T, D]; `carried` the residual streams at the source depths from the entry on."""

    top_BTD: Tensor
    carried: tuple[Tensor, ...]
    cache: Any


class Trunk(Protocol):
    """A decoder-only language model, cut at the entry depth. Depth 0 is the input of the stack, depth d the output of layer d.

    What lies below the entry is the same in every pass and is computed once; a pass runs what lies above. A sequence's tokens are
    contiguous: padding (document -1) stands on the left, or on the right if nothing follows.
    """

    entry: int  # depth at which fed-back states enter; `connect` sets it
    sources: tuple[int, ...]  # depths whose residual stream is handed on, ascending; () = the top state alone
    width: int
    context: int  # longest sequence, in tokens
    context_note: str  # why it is no longer, where that needs saying: what errors add
    vocab_size: int
    can_crop_cache: bool  # recurrent layers' caches can't be cut: they are filled in pieces and forked

    @property
    def supports_prefix_reuse(self) -> bool:
        """Whether a cache can be made and used now. Some activation checkpointing drops it: then only whole sequences can be run."""
        ...

    @property
    def draws_dropout(self) -> bool:
        """Whether running the same inputs again gives other states now."""
        ...

    @property
    def device(self) -> torch.device:
        """Where embeddings are looked up and logits are made."""
        ...

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of the stack, in order. Each is called with the residual stream [B, T, D] as its first argument, and returns it,
        alone or as the first of a tuple: `residual.py` hooks them."""
        ...

    @property
    def head_weight(self) -> Tensor:
        """[V, D]; logits are top states @ head_weight.T, up to rounding."""
        ...

    def connect(self, entry: int, sources: tuple[int, ...]) -> None:
        """Cut the stack at `entry` and hand on these depths. Raises ValueError for depths that it does not have or cannot serve."""
        ...

    def embeddings(self, tokens_BT: Tensor) -> Tensor:
        """[B, T, D] of the embedding table, as it stands there."""
        ...

    def below(self, given: Tensor, layout: Layout = NOWHERE, cache: Any = None, keep: Keep = "none") -> LowerOutput:
        """From tokens [B, T] (integers), or embeddings [B, T, D] as `embeddings` gives them, to the residual stream at the entry."""
        ...

    def above(
        self, x_BTD: Tensor, layout: Layout = NOWHERE, cache: Any = None, keep: Keep = "none", merges: Mapping[int, Merge] | None = None
    ) -> TrunkOutput:
        """From the residual stream at the entry to the top states, with the cache extended by these slots (None for keep="none").

        The cache that was given is never changed. keep="window" lets sliding layers forget what no later query can see. `merges` change
        the stream at depths above the entry.
        """
        ...

    def head(self, top: Tensor) -> Tensor:
        """Logits [..., V] of top states [..., D], as the model itself computes them."""
        ...

    def input_norm(self, merged_BTD: Tensor) -> Tensor:
        """Brings what enters at depth 0 to the scale of plain inputs (App. C, `input_rmsnorm_1`)."""
        ...


def check_depths(entry: int, sources: tuple[int, ...], layers: int) -> tuple[int, tuple[int, ...]]:
    """(entry, sources) as they are. Raises ValueError for depths outside a stack of `layers` layers, or in another order."""
    if not 0 <= entry < layers:
        raise ValueError(f"the entry depth must be at least 0 and below the number of layers, {layers}, got {entry}")
    if list(sources) != sorted(set(sources)) or not all(0 <= depth <= layers for depth in sources):
        raise ValueError(f"source depths must ascend within 0 … {layers}, got {', '.join(map(str, sources))}")
    return entry, sources
