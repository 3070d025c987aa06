"""The switch-on shock and the crossover: what the first feedback passes cost, and when they begin to pay."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fullband.training.step import StepReport

MEMORY = 0.9  # of the running mean: about the last ten steps that feed back
ENOUGH = 10  # steps that feed back before the running mean means anything: with no shock, its sign is noise at first


@dataclass
class Milestones:
    """L2 and L1 are means over the same fused positions.

    switch_on_step, shock   first step that feeds back, and L2 - L1 there (nats)
    crossover_step          first step, from the tenth that feeds back on, at which the running mean of L2 - L1 is negative; None until then
    fed_back                steps that fed back
    """

    switch_on_step: int | None = None
    shock: float | None = None
    crossover_step: int | None = None
    mean_difference: float | None = None
    fed_back: int = 0

    def update(self, step: int, report: StepReport) -> None:
        if report.passes < 2 or not int(report.sums[1].fused_count):  # no fused position of this step is scored
            return
        losses = report.losses()
        difference = losses["fused_pass_2"] - losses["plain_there_2"]
        if self.switch_on_step is None or self.mean_difference is None:
            self.switch_on_step, self.shock, self.mean_difference = step, difference, difference
        else:
            self.mean_difference = MEMORY * self.mean_difference + (1 - MEMORY) * difference
        self.fed_back += 1
        if self.crossover_step is None and self.fed_back >= ENOUGH and self.mean_difference < 0:
            self.crossover_step = step

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Milestones:
        return cls(**state)
