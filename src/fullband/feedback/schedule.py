"""When to feed back, how many passes, from which prefix on: pure functions of (seed, step) and a small checkpointed state (law 7)."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fullband.feedback.multipass import Prefix
from fullband.feedback.noise import keyed_generator
from fullband.feedback.settling import Settling
from fullband.feedback_config import AdaptiveConfig, FeedbackConfig
from fullband.spans import Span, schedule_spans

GOLDEN = (math.sqrt(5) - 1) / 2


class PassSchedule:
    """The progressive schedule of section 3.3: phases of training, each with its distribution over the number of passes.

    The draw of a step is a rotation by the golden ratio with a seeded start: any stretch of steps holds each number of passes in
    its stated share, so the token-equivalent compute of a short run is what its recipe says.
    """

    def __init__(self, config: FeedbackConfig, steps: int, seed: int):
        self.config, self.phases, self.steps, self.seed = config, config.phases, steps, seed
        self.offset = float(keyed_generator("passes", seed).random())
        self.switched_on: int | None = None  # the switch-on of a resumed run, where it is not the recipe's
        self.adaptive = AdaptiveShare(config.adaptive, self._feeding()) if config.adaptive else None

    def probabilities(self, step: int) -> dict[int, float]:
        """Number of passes -> probability at `step` (counted from 0), the adaptive share included."""
        passes = self._spans[bisect_right(self._spans, step, hi=len(self._spans) - 1, key=itemgetter(1))][2]
        return self.adaptive.reshape(passes) if self.adaptive else passes

    def passes(self, step: int) -> int:
        """The number of passes of `step`: the same for every microbatch and rank."""
        probabilities = self.probabilities(step)
        drawn = _draw(probabilities, (self.offset + step * GOLDEN) % 1.0)
        if drawn == 1 and self.warming_fusion(step):  # a plain pass has nothing to teach the fusion
            return min((k for k, p in probabilities.items() if k > 1 and p > 0), default=1)
        return drawn

    @property
    def switch_on(self) -> int | None:
        """The first step of the run that may feed back; None if none does."""
        return self._planned_switch_on if self.switched_on is None else self.switched_on

    @cached_property
    def _spans(self) -> list[Span]:
        return schedule_spans(self.phases, self.steps, self.config.start_step)

    @cached_property
    def _planned_switch_on(self) -> int | None:
        """The first step whose phase feeds back. The adaptive share moves passes, but never to or from 1."""
        return next((first for first, _, passes in self._spans if any(k > 1 and p > 0 for k, p in passes.items())), None)

    def loss_weight(self, step: int) -> float:
        """λ of Eq. 12 at `step`: the configured one, reached in equal parts over `loss_weight_ramp` steps that begin with the switch-on."""
        ramp, on = self.config.loss_weight_ramp, self.switch_on
        if not ramp or on is None:
            return self.config.loss_weight
        return self.config.loss_weight * min(1.0, max(0, step - on + 1) / ramp)

    def warming_fusion(self, step: int) -> bool:
        """Whether `step` trains only the fusion."""
        on = self.switch_on if self.config.fusion_warmup else None
        return on is not None and on <= step < on + self.config.fusion_warmup

    def prefixes(
        self, step: int, accumulation: int, passes: int, length: int, rows: Tensor, plain_BT: Tensor | None = None
    ) -> list[Prefix]:
        """p_2 … p_K for one microbatch of rows [B] (their numbers in the step), all drawn before pass 1: uniform over 0 … length - 2.

        `plain_BT` says where the prompts are: the prefix "answer" is this mask in every pass. Raises ValueError if it has none.
        """
        if self.config.prefix == "answer":
            if plain_BT is None:
                raise ValueError("feedback.prefix: 'answer' needs data that say where answers begin (data.source.kind chat)")
            return [plain_BT] * (passes - 1)
        keys = [2] * (passes - 1) if self.config.prefix == "shared" else range(2, passes + 1)
        return [self._prefix(step, accumulation, k, length, rows) for k in keys]

    def _prefix(self, step: int, accumulation: int, k: int, length: int, rows: Tensor) -> Prefix:
        if self.config.prefix == "off":
            return 0
        if self.config.prefix in ("uniform", "shared"):
            return int(keyed_generator("prefix", self.seed, step, accumulation, k).integers(0, length - 1))
        drawn = [int(keyed_generator("prefix", self.seed, step, k, int(row)).integers(0, length - 1)) for row in rows]
        return torch.tensor(drawn, device=rows.device)

    def token_equivalent_compute(self, tokens_per_step: int) -> int:
        """Σ tokens × passes over the whole run (section 4), as drawn with the present adaptive state."""
        return tokens_per_step * sum(self.passes(step) for step in range(self.steps))

    def _feeding(self) -> float:
        """The share of the run's batches that feed back."""
        return math.fsum((stop - first) * (1 - passes.get(1, 0.0)) for first, stop, passes in self._spans) / self.steps

    def state_dict(self) -> dict[str, Any]:
        share = {"adaptive_share": self.adaptive.share} if self.adaptive else {}
        return {"switch_on": self.switch_on} | share

    def load_state_dict(self, state: dict[str, Any], step: int | None = None) -> None:
        """Take over a state that was saved after `step` steps (None: of this very run).

        Feedback that was on stays on since then; where a changed recipe would have switched it on already, it is switched on at `step`,
        so that warm-up and ramp are not skipped.
        """
        if self.adaptive and "adaptive_share" in state:
            self.adaptive.share = state["adaptive_share"]
        before = state.get("switch_on")
        if step is None or (before is not None and before < step):
            self.switched_on = before
        elif self._planned_switch_on is not None and self._planned_switch_on < step:
            self.switched_on = step


class AdaptiveShare:
    """The share of deeper passes among the batches that feed back, raised while the states do not settle.

    The paper picks 3% of all batches by hand and names a principled choice as open (section 6, limitation 2). Here a few no-grad passes
    measure whether the change of the states shrinks from pass to pass; if not, the share grows by `growth`, else it falls by its root.
    """

    def __init__(self, config: AdaptiveConfig, feeding: float = 1.0):
        """`feeding`: the share of all batches of the run that feed back, which the floor, a share of all of them, is divided by."""
        self.config = config
        self.floor = min(config.ceiling, config.floor / feeding) if feeding else config.floor
        self.share: float | None = None  # None = as the recipe says

    def due(self, step: int) -> bool:
        return step % self.config.every == 0

    def update(self, settling: Settling, passes: dict[int, float] | None = None) -> None:
        """Rows too short to see past the wavefront say nothing: the share stays. The first measure starts from that in `passes`."""
        if not settling.measurable:
            return
        share = max(self.floor, deeper_share(passes or {})) if self.share is None else self.share
        factor = self.config.growth**-0.5 if settling.settled(self.config.ratio) else self.config.growth
        self.share = min(self.config.ceiling, max(self.floor, share * factor))

    def reshape(self, passes: dict[int, float]) -> dict[int, float]:
        """`passes` with the feedback mass split into (1 - share) on the shallowest K ≥ 2 and `share` on the deeper ones.

        A phase with two passes only gets three as its deeper ones: the measure may find them necessary.
        """
        feeding = {k: p for k, p in passes.items() if k > 1 and p > 0}
        if self.share is None or not feeding:
            return passes
        mass, shallow = sum(feeding.values()), min(feeding)
        deeper = {k: p for k, p in feeding.items() if k > shallow} or {shallow + 1: 1.0}
        total = sum(deeper.values())
        reshaped = {k: p for k, p in passes.items() if k == 1} | {shallow: mass * (1 - self.share)}
        return reshaped | {k: mass * self.share * p / total for k, p in deeper.items()}


def deeper_share(passes: dict[int, float]) -> float:
    """The share of the batches that feed back which take more than the smallest K ≥ 2."""
    feeding = {k: p for k, p in passes.items() if k > 1 and p > 0}
    return 1 - feeding[min(feeding)] / sum(feeding.values()) if feeding else 0.0


def _draw(probabilities: dict[int, float], u: float) -> int:
    below = 0.0
    for k, probability in sorted(probabilities.items()):
        below += probability
        if u < below:
            return k
    return max(k for k, p in probabilities.items() if p > 0)
