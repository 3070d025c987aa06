"""The cache that transformers hands from step to step of `generate`: the trunk's and the top state, which move together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from fullband.decode.modes import Mode, resolve_mode, run_tokens
from fullband.decode.prefill import Prefilled, prefill_reported, run_chunks
from fullband.decode.prompts import AlignedPrompts, align_prompts
from fullband.feedback.passes import FeedbackModel
from fullband.feedback.state import DecodeState
from fullband.feedback_config import FeedbackPasses


@dataclass(frozen=True)
class Snapshot:
    """A prompt that has been prefilled: where the next turn, which begins with it, goes on (law 6: answers are prefilled with it)."""

    aligned: AlignedPrompts
    feedback_passes: FeedbackPasses
    prefilled: Prefilled

    def select(self, rows: Tensor) -> Snapshot:
        return replace(self, aligned=self.aligned.select(rows), prefilled=self.prefilled.select(rows))

    def rest_of(self, longer: AlignedPrompts) -> AlignedPrompts | None:
        """What `longer` has after this prompt in every row; None if it does not begin with it."""
        known = self.aligned.tokens_BT.shape[1]
        if longer.tokens_BT.shape[0] != self.aligned.tokens_BT.shape[0] or longer.tokens_BT.shape[1] <= known:
            return None
        if not torch.equal(longer.tokens_BT[:, :known], self.aligned.tokens_BT):
            return None
        before_BT, now_BT = self.aligned.layout.documents_BT, longer.layout[:, :known].documents_BT
        if (before_BT is None) != (now_BT is None) or (before_BT is not None and now_BT is not None and not torch.equal(before_BT, now_BT)):
            return None
        return AlignedPrompts(longer.tokens_BT[:, known:], longer.lengths_B, longer.layout[:, known:])


class FeedbackCache(TransformersCache):
    """The decode state of every row. The first call of `forward` prefills the prompts, later ones run generated tokens.

    Give it to `generate` to go on with a conversation: the prompt that it holds is not run again, the answer is (law 6).
    """

    def __init__(self, latent_feedback_mode: str = "soft", feedback_passes: FeedbackPasses | None = None, resumable: bool = True):
        """resumable: keep what the next turn needs, which in fused is one cache more for every feedback pass.

        Raises ValueError for a mode and passes that do not go together (`resolve_mode`).
        """
        super().__init__(layers=[])
        self.mode = resolve_mode(latent_feedback_mode, feedback_passes)
        self.state: DecodeState | None = None
        self._snapshot: Snapshot | None = None
        self._resumable = resumable

    def read_prompts(
        self, model: FeedbackModel, tokens_BT: Tensor, mask_BT: Tensor | None = None, mode: Mode | None = None, chunk: int | None = None
    ) -> Tensor:
        """Prefill whole prompts [B, T] (mask 0 = padding, on either side), in `mode` from now on; returns their last top states [B, D].

        Raises ValueError as `decode.prefill` does.
        """
        self.mode = mode or self.mode
        passes = self.mode.feedback_passes
        aligned = align_prompts(model.trunk, tokens_BT, mask_BT)
        if not self._resumable or passes == "converged":  # whose passes differ from window to window: none can be gone on with
            self._snapshot = None
            self.state, _ = prefill_reported(model, aligned, passes, chunk)
            return self.state.top_BD
        before, rest = Prefilled.empty(passes), aligned
        if self._snapshot is not None and self._snapshot.feedback_passes == passes:
            after = self._snapshot.rest_of(aligned)
            before, rest = (self._snapshot.prefilled, after) if after is not None else (before, aligned)
        for before, outputs in run_chunks(model, rest, before, chunk, goes_on=True):  # noqa: B007, B020
            pass
        self._snapshot = Snapshot(aligned, passes, before)
        self.state = before.state(aligned, outputs[-1].top_BTD[:, -1])
        return self.state.top_BD

    def read_tokens(self, model: FeedbackModel, tokens_BT: Tensor) -> Tensor:
        """Run tokens that were generated, one after another in every row; returns their top states [B, T, D].

        Raises ValueError before a prompt was prefilled, and where a row would leave the model's context.
        """
        if self.state is None:
            raise ValueError("this cache holds no prompt yet")
        if self.state.cache.length + tokens_BT.shape[1] > model.trunk.context:
            full = f"the model's context of {model.trunk.context} tokens is full"
            raise ValueError(f"{full}: generate fewer, or shorten the prompt{model.trunk.context_note}")
        with torch.no_grad():
            self.state, top_BTD = run_tokens(model, self.state, tokens_BT, self.mode.feeds_back)
        return top_BTD

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.state is None else self.state.cache.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from row beam_idx[i]."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = self.state.top_BD.shape[0]
            self._select(torch.arange(rows, device=self.state.top_BD.device).repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        if self.state is None:
            raise ValueError("this cache holds no prompt yet: it has no rows to choose from")
        rows = rows.to(self.state.top_BD.device, torch.long)
        self.state = self.state.select(rows)
        if self._snapshot is not None:
            self._snapshot = self._snapshot.select(rows)

    def reset(self) -> None:
        self.state = self._snapshot = None

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a cache with latent feedback is not cut back: the top state of an earlier position is gone")

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a cache with latent feedback holds whole states; only FullBandForCausalLM extends it")

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.top_BD.shape[0]

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.state is not None
