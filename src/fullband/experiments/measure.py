"""What is measured of a trained model: numbers by evaluation ("standard", "fused-4", "exact", …) and column (of what)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from fullband.config import Recipe, TaskSource
from fullband.data.build import build_loader
from fullband.data.tasks import build_task
from fullband.data.tokenizers import load_tokenizer
from fullband.diagnose import judge, rows_of_documents, trace_passes
from fullband.evaluate.loss import accuracy_by_position
from fullband.experiments.config import PositionsMeasure, ProbeMeasure, SettlingMeasure
from fullband.feedback.by_passes import positions_to_run
from fullband.feedback.mergers import MERGERS, Gated
from fullband.feedback_config import Control, FeedbackPasses
from fullband.loading import load_model
from fullband.model import FullBandModel, resolve_model_folder

STANDARD = "standard"  # the only evaluation of a model that was trained without feedback
DOCUMENTS = 256  # that sequences of text are cut from, at most
PROBE_TOKENS = 131072  # at a time: the models of experiments are small, and a recurrent prefill costs little more for more sequences

RunProgress = Callable[[FullBandModel, int], AbstractContextManager[None]]  # entered while a model runs that many positions


def silent(model: FullBandModel, positions: int) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Measured:
    """`values[evaluation][column]`; `verdict` and `trace` are `diagnose`'s, of text models."""

    values: dict[str, dict[str, float]]
    verdict: str | None = None
    trace: dict[str, Any] | None = None


def measure(recipe: Recipe, plan: PositionsMeasure | SettlingMeasure | ProbeMeasure, progress: RunProgress = silent) -> Measured:
    """Measure the model in the run folder of `recipe`. Raises ValueError if it cannot be measured so."""
    folder = resolve_model_folder(Path(recipe.output or ""))
    model = load_model(folder)
    assert isinstance(model, FullBandModel)
    model.connection.control = recipe.feedback.control  # a model that was trained under a control is evaluated under it
    if isinstance(plan, PositionsMeasure):
        return _positions(model, recipe, plan, progress)
    if isinstance(plan, SettlingMeasure):
        return _settling(model, recipe, plan, progress)
    return _probe(model, recipe, folder, plan, progress)


def evaluation_name(recipe: Recipe, passes: FeedbackPasses) -> str:
    """ "standard" for a model without feedback; else "fused-0", "fused-1", … or "exact"."""
    return (f"fused-{passes}" if isinstance(passes, int) else passes) if recipe.feedback.feeds_back else STANDARD


def evaluations_of(recipe: Recipe, plan: PositionsMeasure | SettlingMeasure | ProbeMeasure) -> list[str]:
    """Names of the evaluations that `measure` makes of the model that `recipe` trains."""
    if not recipe.feedback.feeds_back:
        return [STANDARD]
    if isinstance(plan, ProbeMeasure):
        return list(plan.prefills)
    names = [evaluation_name(recipe, passes) for passes in plan.feedback_passes]
    if isinstance(plan, PositionsMeasure) and recipe.feedback.control == "none":
        gated = issubclass(MERGERS[recipe.connection.fusion or "gated"], Gated)
        names += [f"{names[-1]}, {control}" for control in plan.controls if gated or control != "constant-gate"]
    return names


def _positions(model: FullBandModel, recipe: Recipe, plan: PositionsMeasure, progress: RunProgress) -> Measured:
    if not isinstance(recipe.data.source, TaskSource):
        raise ValueError(f"measure: positions are for built-in tasks, not for {recipe.data.source.kind}")
    examples = build_task(recipe.data.source).examples(recipe.seed, "validation", 0, plan.rows, max(plan.positions))
    passes = {evaluation_name(recipe, how): how for how in (plan.feedback_passes if recipe.feedback.feeds_back else [0])}
    values = {}
    for name in evaluations_of(recipe, plan):
        uncontrolled, _, control = name.partition(", ")
        how = passes[uncontrolled]
        ran = positions_to_run(examples.tokens.numel(), [how])
        with under(model, cast(Control, control) or model.connection.control), progress(model, ran):
            accuracy_T = accuracy_by_position(model, examples.tokens, examples.targets, how, batch_rows=256).accuracy_T
        values[name] = {str(position): float(accuracy_T[position - 1]) for position in plan.positions}
    return Measured(values)


@contextmanager
def under(model: FullBandModel, control: Control) -> Iterator[None]:
    """The model with its carried states, or its gate, taken away."""
    before, model.connection.control = model.connection.control, control
    try:
        yield
    finally:
        model.connection.control = before


def _settling(model: FullBandModel, recipe: Recipe, plan: SettlingMeasure, progress: RunProgress) -> Measured:
    data = recipe.data.model_copy(update={"tokenizer": "bytes"}) if recipe.data.tokenizer == "auto" else recipe.data
    documents = build_loader(data, recipe.seed, 1).validation_documents(DOCUMENTS)
    batch = rows_of_documents(documents, plan.rows, plan.passes, model.trunk.context, plan.length)
    with progress(model, positions_to_run(batch.tokens.numel(), [plan.passes, "exact"])):
        trace = trace_passes(model, batch, plan.passes)
    values = {}
    for passes in plan.feedback_passes if recipe.feedback.feeds_back else [0]:
        last = len(trace.records) - 1  # nothing changed after it
        values[evaluation_name(recipe, passes)] = {"loss": trace.loss_exact if passes == "exact" else trace.records[min(passes, last)].loss}
    return Measured(values, judge(trace).word if recipe.feedback.feeds_back else None, asdict(trace))


def _probe(model: FullBandModel, recipe: Recipe, folder: Path, plan: ProbeMeasure, progress: RunProgress) -> Measured:
    from fullband.probe.probing import plan_probe, run_probe

    prefills = plan.prefills if recipe.feedback.feeds_back else [STANDARD]
    planned = plan_probe(model, load_tokenizer(folder), plan.tasks, prefills, groups=plan.groups, depths=[0])
    with progress(model, planned.positions):
        result = run_probe(model, planned, PROBE_TOKENS)
    values: dict[str, dict[str, float]] = {name: {} for name in result.prefills}
    for setting in result.settings:
        for found in setting.prefills:
            values[found.prefill][setting.setting] = found.depths[0].accuracy
    return Measured(values)
