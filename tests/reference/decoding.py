"""The slow twin of decoding: no cache, no chunks, no mask; whole rows are run anew for every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fullband.trunk.attention import dense_plan
from reference.seam import embed, run_trunk

Run = Callable[[Any, Tensor], Tensor]  # top states [B, T, D] of whole rows of inputs, from the trunk alone


def run_decoder(model: Any, inputs_BTD: Tensor) -> Tensor:
    """Of an App. A decoder."""
    plan, model.trunk.plan = model.trunk.plan, dense_plan
    states, _ = run_trunk(model.trunk, inputs_BTD)
    model.trunk.plan = plan
    return states


class ReferenceRows:
    """Rows of any lengths (Eqs. 8-11, Listing 2), each as if alone: padding stands behind its end, and nothing looks ahead.

    inputs  [T_b, D] of each row
    """

    @torch.no_grad()
    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], feedback_passes: int | str, run: Run = run_decoder) -> None:
        self.model, self.run = model, run
        embedded = [embed(model.trunk, torch.tensor([list(prompt)]))[0] for prompt in prompts]
        self.inputs = embedded
        if feedback_passes == "exact":
            self.inputs = [row[:1] for row in embedded]
            for t in range(1, max(map(len, embedded))):
                self.append([row[t] if t < len(row) else None for row in embedded], self.tops())
        else:
            for _ in range(int(feedback_passes)):
                states = self.states()
                fused = [self.fuse(row[1:], own[: len(row) - 1]) for row, own in zip(embedded, states, strict=True)]
                self.inputs = [torch.cat([row[:1], rest]) for row, rest in zip(embedded, fused, strict=True)]

    def states(self) -> Tensor:
        """[B, longest, D]"""
        return self.run(self.model, pad_sequence(self.inputs, batch_first=True))

    @torch.no_grad()
    def tops(self) -> Tensor:
        """[B, D], of the last position of each row."""
        return self.states()[range(len(self.inputs)), [len(row) - 1 for row in self.inputs]]

    def fuse(self, embedded_TD: Tensor, states_TD: Tensor) -> Tensor:
        return self.model.connection.merge(embedded_TD[None], states_TD[None], self.model.trunk)[0]

    @torch.no_grad()
    def append(self, embedded_D: Sequence[Tensor | None], tops_BD: Tensor | None) -> None:
        """Another position for each row that is given an embedding; plain without `tops_BD`."""
        for number, embedding in enumerate(embedded_D):
            if embedding is not None:
                row = embedding[None] if tops_BD is None else self.fuse(embedding[None], tops_BD[number][None])
                self.inputs[number] = torch.cat([self.inputs[number], row])

    @torch.no_grad()
    def append_tokens(self, tokens_B: Sequence[int], tops_BD: Tensor | None) -> None:
        self.append(list(embed(self.model.trunk, torch.tensor(tokens_B)[:, None])[:, 0]), tops_BD)


def reference_rows(
    model: Any,
    prompts: Sequence[Sequence[int]],
    new: Sequence[Sequence[int]],
    feedback_passes: int | str,
    feeds_back: bool,
    run: Run = run_decoder,
) -> Tensor:
    """Top states [B, 1 + N, D] after the prompts and after each of the N `new` tokens."""
    rows = ReferenceRows(model, prompts, feedback_passes, run)
    tops = [rows.tops()]
    for tokens in zip(*new, strict=True):
        rows.append_tokens(tokens, tops[-1] if feeds_back else None)
        tops.append(rows.tops())
    return torch.stack(tops, dim=1)


def reference_tops(
    model: Any, prompt: Sequence[int], new: Sequence[int], feedback_passes: int | str, feeds_back: bool, run: Run = run_decoder
) -> list[Tensor]:
    """Top states [D] of one row, after the prompt and after each of the `new` tokens."""
    return list(reference_rows(model, [prompt], [new], feedback_passes, feeds_back, run)[0])


def reference_greedy(
    model: Any, prompts: Sequence[Sequence[int]], count: int, feedback_passes: int | str, feeds_back: bool, run: Run = run_decoder
) -> list[list[int]]:
    """The `count` most likely tokens of each prompt, one after the other."""
    rows, made = ReferenceRows(model, prompts, feedback_passes, run), []
    for _ in range(count):
        tops_BD = rows.tops()
        made.append(model.trunk.head(tops_BD).argmax(-1).tolist())
        rows.append_tokens(made[-1], tops_BD if feeds_back else None)
    return [list(row) for row in zip(*made, strict=True)]
