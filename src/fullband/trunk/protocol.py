"""What feedback asks of a trunk. Two implementations are meant: the App. A decoder, and any Hugging Face causal LM."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from torch import Tensor, nn

Keep = Literal["none", "window", "all"]


class Trunk(Protocol):
    """Maps stack inputs to top states. A row's tokens are contiguous:
    padding (document -1) stands to the left, or to the right if nothing follows."""

    context: int  # longest sequence, in tokens
    context_note: str  # why it is no longer, where that needs saying: what errors add
    vocab_size: int
    crops: bool  # whether its caches can be cut back; recurrent layers cannot, they are run in pieces and forked

    @property
    def reuses(self) -> bool:
        """Whether a cache can be made and read now. Some checkpointing of activations drops it: then only whole rows can be read."""
        ...

    @property
    def dropout(self) -> bool:
        """Whether reading the same inputs again gives other states now."""
        ...

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """e_t [B, T, D]: token embeddings exactly as the stack gets them on a plain position."""
        ...

    def input_norm(self, inputs_BTD: Tensor) -> Tensor:
        """Brings fused inputs to the scale of plain ones (App. C, `input_rmsnorm_1`)."""
        ...

    def forward(
        self,
        inputs_BTD: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Any | None = None,
        keep: Keep = "none",
    ) -> tuple[Tensor, Any | None]:
        """(top states [B, T, D] after the final norm, the cache extended by these T slots, or None for keep="none").

        A trunk that feeds back another state than the top one puts it behind that: states are [B, T, 2D] then, and so wide is the head.

        `documents_BT` None means one document a row and no padding; `positions_BT` None means slots count from 0.
        The cache that was given is never changed. keep="window" lets sliding layers forget what no later query can see.
        """
        ...

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of the stack, in order. Each is called with the residual stream [B, T, D] as its first argument, and returns it,
        alone or as the first of a tuple: `residual.py` hooks them."""
        ...

    @property
    def head_weight(self) -> Tensor:
        """[V, D]; logits are states @ head_weight.T. Zeros stand where it does not read a state."""
        ...

    def __call__(
        self,
        inputs_BTD: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Any | None = None,
        keep: Keep = "none",
    ) -> tuple[Tensor, Any | None]: ...
