"""What is fed back in a step of vLLM, and what is kept for later ones. Knows requests and rows, nothing of vLLM's runners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fullband.decode.modes import Mode

STACKED = 64  # states of one request that are copied into a tensor of their own: till then they keep their neighbours' alive


@dataclass(frozen=True)
class Chunk:
    """What one request computes in one step: rows first, …, stop - 1 of the batch.

    position   of the row `first`
    prompt     tokens of the request's prompt; what follows was generated
    blocks     ids of its blocks of keys and values, `block_size` positions each
    """

    request: str
    mode: Mode
    first: int
    stop: int
    position: int
    prompt: int
    blocks: Sequence[int]

    @property
    def generated(self) -> int:
        """The first row of a generated token; `stop` if there is none."""
        return min(self.stop, self.first + max(0, self.prompt - self.position))

    @property
    def passes(self) -> int:
        """Feedback passes over the rows of the prompt. After as many as it has tokens but one nothing moves any more."""
        assert isinstance(self.mode.feedback_passes, int), "refused when the request came"
        return min(self.mode.feedback_passes, self.prompt - 1) if self.position < self.prompt else 0


class _History:
    """States [D] at the positions P - 1, P, … of a prompt of P tokens."""

    def __init__(self) -> None:
        self._stacked: list[Tensor] = []
        self._last: list[Tensor] = []

    def __len__(self) -> int:
        return STACKED * len(self._stacked) + len(self._last)

    def __getitem__(self, place: int) -> Tensor:
        stack, row = divmod(place, STACKED)
        return self._stacked[stack][row] if stack < len(self._stacked) else self._last[row]

    def put(self, place: int, state_D: Tensor) -> None:
        """The next one, or one that was computed again."""
        stack, row = divmod(place, STACKED)
        assert place <= len(self), "states come in the order of positions"
        if stack < len(self._stacked):
            self._stacked[stack][row] = state_D
        elif row < len(self._last):
            self._last[row] = state_D
        else:
            self._last.append(state_D)
        if len(self._last) == STACKED:
            self._stacked.append(torch.stack(self._last))
            self._last = []


@dataclass
class Carried:
    """States between steps.

    Of every generated position, and not of the last alone: a request that was preempted is computed again, prompt and answer together, and
    each token of the answer needs the state that came before it.

    tails_ND   with two sets of keys and values: of the first pass, the last known state in every block. A chunk of a prompt begins where
               another ended, or where a cached prefix ends: either way behind the state of a block.
    """

    block_size: int = 0
    histories: dict[str, _History] = field(default_factory=dict)
    tails_ND: Tensor | None = None

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            self.histories.pop(request, None)

    def before_generated(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[Tensor]]:
        """(Rows of generated tokens, the state [D] before each) of the requests that feed back."""
        rows: list[int] = []
        before: list[Tensor] = []
        for chunk in chunks:
            if chunk.mode.feeds_back and chunk.generated < chunk.stop:
                history, place = self.histories[chunk.request], chunk.position - chunk.first - chunk.prompt
                rows += range(chunk.generated, chunk.stop)
                before += [history[place + row] for row in range(chunk.generated, chunk.stop)]
        return rows, before

    def before_prompt(self, chunk: Chunk) -> Tensor | None:
        """The first pass's state [D] before a chunk of a prompt; None at its beginning."""
        if chunk.position == 0:
            return None
        assert self.tails_ND is not None, "without two sets of keys and values prompts are prefilled whole"
        return self.tails_ND[chunk.blocks[(chunk.position - 1) // self.block_size]]

    def keep_tails(self, chunk: Chunk, states_ND: Tensor) -> None:
        """Keep what the next chunk, or another request with the same beginning, takes from the first pass."""
        last = chunk.position + chunk.generated - chunk.first - 1
        for number in range(chunk.position // self.block_size, last // self.block_size + 1):
            row = chunk.first + min(last, (number + 1) * self.block_size - 1) - chunk.position
            self._tails(chunk.blocks[number], states_ND)[chunk.blocks[number]] = states_ND[row]

    def _tails(self, block: int, like_ND: Tensor) -> Tensor:
        known = 0 if self.tails_ND is None else len(self.tails_ND)
        if block >= known:
            grown_ND = like_ND.new_zeros(2 * block + 64, like_ND.shape[-1])
            if self.tails_ND is not None:
                grown_ND[:known] = self.tails_ND
            self.tails_ND = grown_ND
        assert self.tails_ND is not None
        return self.tails_ND

    def keep_generated(self, chunks: Sequence[Chunk], states_ND: Tensor) -> None:
        """Keep the states of generated tokens, and of each prompt's last."""
        kept = [chunk for chunk in chunks if chunk.mode.feeds_back and chunk.position + chunk.stop - chunk.first >= chunk.prompt]
        firsts = [chunk.first + max(0, chunk.prompt - 1 - chunk.position) for chunk in kept]
        rows = [row for chunk, first in zip(kept, firsts, strict=True) for row in range(first, chunk.stop)]
        if not rows:
            return
        states = iter(states_ND[rows].unbind())
        for chunk, first in zip(kept, firsts, strict=True):
            history = self.histories.setdefault(chunk.request, _History())
            for row in range(first, chunk.stop):
                history.put(chunk.position + row - chunk.first - (chunk.prompt - 1), next(states))
