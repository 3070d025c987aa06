"""Everything `fullband diagnose` measures, in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fullband.data.batch import Batch
from fullband.diagnose.numbers import Trace
from fullband.diagnose.perturb import Perturbation, perturb
from fullband.diagnose.reach import POSITIONS, Reach, measure_reach
from fullband.diagnose.rollout import LongRollout, check_rollout, roll_out
from fullband.diagnose.sequences import prompts_of
from fullband.diagnose.trace import trace_passes
from fullband.diagnose.verdict import Verdict, judge, reference_loss
from fullband.feedback.passes import FeedbackModel

ROLLOUT_ROWS = 4
ROLLOUT_PROMPT = 32

Watcher = Callable[[str, int, int], None]  # (what is being done, done, of how many)


@dataclass(frozen=True)
class DiagnosisSettings:
    """What to measure.

    passes       most passes over the rows
    tolerance    relative change, and distance to exact evaluation, that count as settled
    rollout      new tokens of a rollout, at least 2; 0 = none
    temperature  of the sampled rollout, beside the greedy one
    sigma        size of the perturbation, relative to the state's norm
    seed         of sampling, noise and projections
    """

    passes: int = 32
    tolerance: float = 1e-2
    rollout: int = 2048
    temperature: float = 1.0
    sigma: float = 0.02
    seed: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """The verdict, and everything that was measured. `reach` is empty, and `reach_missing` says why, where the trunk shows no blocks;
    `perturbation` is None for rows too short to follow one."""

    verdict: Verdict
    settings: DiagnosisSettings
    trace: Trace
    rollouts: list[LongRollout]
    perturbation: Perturbation | None
    reach: list[Reach]
    reach_missing: str | None

    def to_json(self) -> dict[str, Any]:
        """Plain data; "verdict" is the word, "why" its sentences, "worse" what is said of a loss that passes made worse, or None."""
        found = asdict(self) | {"verdict": self.verdict.word, "worse": self.verdict.worse, "why": self.verdict.why}
        found["reference_loss"] = reference_loss(self.trace)
        found["trace"]["returns"]["period"] = self.trace.returns.period
        return found


def diagnose(model: FeedbackModel, batch: Batch, settings: DiagnosisSettings | None = None, watcher: Watcher | None = None) -> Diagnosis:
    """Diagnose a model on rows of one document each (`rows_of_documents`, `rows_of_task`).

    Raises ValueError for settings and rows that cannot be measured, before anything that takes long.
    """
    settings = settings or DiagnosisSettings()
    if settings.rollout:
        check_rollout(settings.rollout)
    batch.validate(model.trunk.vocab_size)
    report = watcher or (lambda what, done, total: None)

    def part(what: str) -> Callable[[int, int], None]:
        return lambda done, total: report(what, done, total)

    trace = trace_passes(model, batch, settings.passes, settings.tolerance, part("evaluating in passes"))
    prompts = prompts_of(batch, min(ROLLOUT_PROMPT, max(2, batch.shape[1] // 2)), ROLLOUT_ROWS)
    rollouts = [
        roll_out(model, prompts, settings.rollout, temperature, settings.seed, progress=part(name))
        for name, temperature in (("generating, greedy", 0.0), ("generating, sampled", settings.temperature))
        if settings.rollout
    ]
    report("following a nudge", 0, 1)
    perturbation = perturb(model, batch, settings.sigma, seed=settings.seed) if batch.shape[1] >= 4 else None
    report("asking what states can reach", 0, 1)
    reach, missing = _reach(model, batch, settings.seed)
    return Diagnosis(judge(trace), settings, trace, rollouts, perturbation, reach, missing)


def _reach(model: FeedbackModel, batch: Batch, seed: int) -> tuple[list[Reach], str | None]:
    if batch.shape[1] < POSITIONS:
        return [], f"rows of {batch.shape[1]} positions are too short"
    try:
        return measure_reach(model, batch.tokens[0, :POSITIONS], seed=seed), None
    except ValueError as error:
        return [], str(error)
