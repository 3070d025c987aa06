"""What models whose dynamics are known have in common: they write `embed`, `fusion` and a call of the trunk, and inherit the seam."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullband.feedback.connection import Connection
from fullband.feedback_config import ConnectionConfig
from fullband.layout import NOWHERE, Layout
from fullband.trunk.protocol import LowerOutput, TrunkOutput


class _Fusion(nn.Module):
    def __init__(self, toy: Any):
        super().__init__()
        self.toy = [toy]  # not a part of it

    def forward(self, x: Tensor, carried: Tensor, input_norm: Any) -> Tensor:
        return self.toy[0].fusion(x, carried, input_norm)


class ToyModel:
    """A trunk and a connection in one."""

    entry, context_note, supports_prefix_reuse, draws_dropout, can_crop_cache = 0, "", True, False, True
    sources: tuple[int, ...] = ()
    device = torch.device("cpu")
    connection: Any
    trunk: Any

    def connect_itself(self) -> None:
        self.trunk, self.connection = self, Connection(ConnectionConfig(), 1, 1)
        self.connection.mergers[0] = _Fusion(self)

    def below(self, given: Tensor, layout: Layout = NOWHERE, cache: Any = None, keep: str = "none") -> LowerOutput:
        return LowerOutput(self.embed(given), (), None)  # type: ignore[attr-defined]

    def above(self, x: Tensor, layout: Layout = NOWHERE, cache: Any = None, keep: str = "none", merges: Any = None) -> TrunkOutput:
        top, cache = self(x, layout.positions_BT, layout.documents_BT, cache, keep)  # type: ignore[operator]
        return TrunkOutput(top, (), cache)

    def head(self, top: Tensor) -> Tensor:
        return F.linear(top, self.head_weight)  # type: ignore[attr-defined]
