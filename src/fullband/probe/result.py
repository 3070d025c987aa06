"""What a probe found, as numbers and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DepthResult:
    """One probe: a way of prefilling and a depth of the residual stream.

    accuracy, stderr, interval   held-out accuracy, its standard error over folds, Wilson's 95% interval over examples
    by_updates                   accuracy by null updates before the question
    shuffled_labels              accuracy of a probe fitted to labels that were permuted within their groups
    moved                        patching the stream here with the partner's: share of answers that become the partner's. None where
                                 the model answers no pair differently
    effect                       how far the margin between the answers moves towards the partner's: 0 = not at all, 1 = all the way
    """

    depth: int
    accuracy: float
    stderr: float
    interval: tuple[float, float]
    by_updates: dict[int, float]
    shuffled_labels: float
    moved: float | None
    effect: float | None


@dataclass(frozen=True)
class PrefillResult:
    """One way of prefilling. `answered`: share of examples that the model itself answers rightly; `pairs`: share of pairs of partners that
    it answers differently, which `moved` and `effect` are taken over; `embedding_only`: the probe on an input with nothing processed."""

    prefill: str
    steps: int | None
    answered: float
    pairs: float
    embedding_only: float
    depths: list[DepthResult]


@dataclass(frozen=True)
class SettingResult:
    """One setting of App. F. `lengths`: tokens of an input by null updates; `notes`: adjustments to the tokenizer."""

    setting: str
    task: str
    registers: int | None
    writes_each: int | None
    groups: int
    examples: int
    lengths: dict[int, int]
    notes: list[str]
    prefills: list[PrefillResult]

    def of(self, prefill: str) -> PrefillResult:
        return next(result for result in self.prefills if result.prefill == prefill)


@dataclass(frozen=True)
class ProbeResult:
    """All settings; `depths` counts those that were probed, the stack's input and the output of every layer unless fewer were asked for."""

    seed: int
    depths: int
    prefills: list[str]
    settings: list[SettingResult]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
