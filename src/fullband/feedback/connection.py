"""The connection: where a state is taken, how it is carried, where it enters.

    s_t = take(streams at the source depths of position t)            the top state: h_t after the final norm
    c_t = carry(s_{t-1}, ..., s_{t-W})                                W = 1: s_{t-1}
    x_t <- merge(x_t, c_t)                                            x_t the residual stream at the entry depth; Eq. 4 at depth 0

The paper's: the top state, one position, merged by a gated linear unit with the embedding at the input of the stack. Depth 0 is that
input, depth d the output of layer d.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fullband.feedback.mergers import Gated, build_merger
from fullband.feedback_config import ConnectionConfig, Control
from fullband.layout import Layout
from fullband.trunk.protocol import Trunk, TrunkOutput


class Connection(nn.Module):
    """See the module. `control` (ablations): zeroed = the carried state is 0; shuffled = it comes from the next sequence of the batch;
    constant-gate = the token's gate is one half everywhere.

    sources   depths whose residual streams are taken; () = the top state. One is brought to a root mean square of 1, several are mixed
              with learned weights (as in the Feedback Transformer) and then brought to it
    entries   depths at which the carried state enters, ascending, with a merger each
    window    positions that are carried: the states of the last `window` positions are mixed with learned weights
    """

    def __init__(self, config: ConnectionConfig, width: int, layers: int, eps: float = 1e-6):
        super().__init__()
        self.config, self.window, self.eps = config, config.window, eps
        self.sources = config.source_depths(layers)
        self.entries = config.entry_depths(layers)
        self.mergers = nn.ModuleList(build_merger(config.fusion or "gated", width) for _ in self.entries)
        if len(self.sources) > 1:
            self.mix = nn.Parameter(torch.zeros(len(self.sources)))
        if self.window > 1:  # the nearest position has most of the weight, as it has all of it without a window
            self.ages = nn.Parameter(-torch.arange(self.window, dtype=torch.float32))
        self.control = "none"

    @property
    def control(self) -> Control:
        return self._control

    @control.setter
    def control(self, control: Control) -> None:
        self._control: Control = control
        for merger in self.mergers:
            if isinstance(merger, Gated):
                merger.half_open = control == "constant-gate"

    def take(self, output: TrunkOutput, lower: tuple[Tensor, ...]) -> Tensor:
        """s [B, T, D] of the positions that were run; `lower` are the streams at source depths below the entry, ascending."""
        streams = (*lower, *output.carried)
        if not self.sources:
            return output.top_BTD
        if len(streams) == 1:
            state = streams[0]
        else:
            state = torch.stack([share * stream for share, stream in zip(self.mix.softmax(dim=0), streams, strict=True)]).sum(dim=0)
        return nn.functional.rms_norm(state, state.shape[-1:], eps=self.eps)

    def shift(self, states_BTD: Tensor, before_BWD: Tensor | None, layout: Layout) -> Tensor:
        """c [B, T, D] for T positions: their own states shifted right by one, those before them from `before_BWD` [B, W, D], oldest first
        (None where sequences begin here). The last state is not used."""
        batch, length, width = states_BTD.shape
        if before_BWD is None:
            before_BWD = states_BTD.new_zeros(batch, self.window, width)
        if length == self.window == 1:
            return before_BWD  # a step of decoding copies nothing
        carried = torch.cat([before_BWD, states_BTD[:, :-1]], dim=1)
        if self.window == 1:
            return carried
        known_B1W = self._known(layout, length, carried)
        weights = self.ages.flip(0).to(carried.dtype).masked_fill(~known_B1W, -torch.inf)
        weights = torch.where(known_B1W.any(-1, keepdim=True), weights, 0).softmax(dim=-1)
        return torch.einsum("btdw,btw->btd", carried.unfold(1, self.window, 1), weights.expand(batch, -1, -1))

    def _known(self, layout: Layout, length: int, like: Tensor) -> Tensor:
        """Which of the window's positions, oldest first, lie in the same document: bool [B or 1, T, W]."""
        ages = torch.arange(self.window, 0, -1, device=like.device)
        positions = layout.positions_BT
        assert positions is not None, "a window needs positions"
        return positions[..., None] >= ages

    def roll(self, before_BWD: Tensor | None, states_BTD: Tensor) -> Tensor:
        """The states of the last W positions [B, W, D] after these; zeros stand where sequences have fewer."""
        if states_BTD.shape[1] >= self.window:
            return states_BTD[:, -self.window :]
        known = states_BTD if before_BWD is None else torch.cat([before_BWD, states_BTD], dim=1)
        missing = max(0, self.window - known.shape[1])
        return nn.functional.pad(known[:, -self.window :], (0, 0, missing, 0))

    def merge(self, x_BTD: Tensor, carried_BTD: Tensor, trunk: Trunk, place: int = 0) -> Tensor:
        """What enters at `entries[place]`, at the scale of plain inputs. Raises ValueError for the control 'shuffled' with one sequence."""
        if self.control == "zeroed":
            carried_BTD = torch.zeros_like(carried_BTD)
        elif self.control == "shuffled":
            if carried_BTD.shape[0] < 2:
                raise ValueError("the control 'shuffled' takes the carried state from another row: it needs at least two rows")
            carried_BTD = carried_BTD.roll(1, dims=0)
        merged: Tensor = self.mergers[place](x_BTD, carried_BTD, None if self.entries[place] else trunk.input_norm)
        return merged


def connect(trunk: Trunk, connection: Connection) -> None:
    """Cut the trunk at the first entry. Raises ValueError for depths that it does not have or cannot serve."""
    if connection.entries[-1] >= len(trunk.layers):
        raise ValueError(f"an entry depth must be below the number of layers, {len(trunk.layers)}, got {connection.entries[-1]}")
    trunk.connect(connection.entries[0], connection.sources)


OLDER_NAMES = {"fusion.": "connection.mergers.0.", "trunk.fed_back.": "connection."}  # of parameters, before connections


def current_name(name: str) -> str:
    """Today's name of a parameter that was saved under `name`."""
    for older, newer in OLDER_NAMES.items():
        if name.startswith(older):
            return newer + name.removeprefix(older)
    return name


def rename_older(module: nn.Module, tensors: dict[str, Any], prefix: str, *others: Any) -> None:
    """A hook before `load_state_dict`: tensors that were saved under older names get today's. Trainers load unstrictly, and would leave
    the connection as it is."""
    for name in [name for name in tensors if name.startswith(prefix)]:
        newer = prefix + current_name(name.removeprefix(prefix))
        if newer != name:
            tensors[newer] = tensors.pop(name)
