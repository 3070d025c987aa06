"""The training loop."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fullband.config import Recipe
from fullband.data.batch import Batch
from fullband.feedback.settling import measure_settling
from fullband.feedback_config import FeedbackPasses
from fullband.files import LOCK, alone_in
from fullband.optim.groups import describe_groups, is_fusion
from fullband.training.checks import check_run_folder
from fullband.training.evaluation import validation_losses
from fullband.training.metrics import Tracker, open_trackers
from fullband.training.milestones import Milestones
from fullband.training.parallel import held_by_main, running
from fullband.training.progress import shown_progress
from fullband.training.run import DivergedError, Run, prepare
from fullband.training.starts import recorded
from fullband.training.step import StepReport, accumulate_gradients
from fullband.training.stop import StopRequest, stop_signals


class Watcher(Protocol):
    """Someone who looks on, such as a progress bar."""

    def started(self, run: Run, groups: str) -> None: ...

    def stepped(self, run: Run, values: dict[str, Any]) -> None: ...

    def evaluated(self, run: Run, losses: dict[str, float]) -> None: ...


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `signal` is the one that stopped it, or None if it is complete; `main` whether this process speaks for the run."""

    folder: Path
    checkpoint: Path
    steps: int
    tokens: int
    token_equivalent: int
    executed_positions: int
    validation: dict[str, float]
    milestones: Milestones
    seconds: float
    signal: int | None = None
    main: bool = True


def train(recipe: Recipe, resume: bool = False, watcher: Watcher | None = None) -> RunResult:
    """Train a recipe to its end, a signal, or a non-finite loss.

    watcher   None = progress on stderr, if that is a terminal or a notebook

    Raises ValueError for a recipe that does not fit or a run that another process is training, and DivergedError, which names the
    step, for a loss that is not finite.
    """
    with running(recipe) as parallel, ExitStack() as held:
        check_run_folder(recipe.folder)
        held_by_main(parallel, held, own_folder(recipe.folder))
        run = prepare(recipe, resume, parallel)
        if watcher is None and parallel.main and (progress := shown_progress()):
            watcher = held.enter_context(progress)
        ended = held.enter_context(recorded(run)) if parallel.main else {}
        result = _train(run, watcher if parallel.main else None)
        ended["signal"] = result.signal
        return result


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """While the block runs, the run folder is this process's alone, from before anything is written into it.

    A folder that was made for it and stays empty, as the run was refused, is removed. Raises InUseError, and ValueError if the folder
    cannot be made.
    """
    made = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: cannot write the run folder ({error.strerror})") from None
    try:
        with alone_in(folder):
            try:
                yield
            finally:
                if made and [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
    finally:
        for place in made:
            with suppress(OSError):  # not empty: there is a run
                place.rmdir()


def _train(run: Run, watcher: Watcher | None) -> RunResult:
    recipe = run.recipe
    config, evaluation = recipe.train, recipe.evaluation
    held_out = run.held_out
    settings = recipe.model_dump(mode="json")
    trackers: list[Tracker] = []
    opened = config.tracker, run.folder, recipe.name, settings, run.step, run.pending
    run.parallel.from_main(lambda: trackers.extend(open_trackers(*opened)))
    validation: dict[str, float] = {}
    checkpoint = run.checkpoints.last()
    start, tokens_before = time.perf_counter(), run.tokens
    if watcher:
        with suppress(OSError):  # a terminal that is gone stops no run
            watcher.started(run, describe_groups(run.optimizer.groups, recipe.optim))
    elif run.parallel.main:
        for notice in run.notices:
            warnings.warn(notice, stacklevel=3)
    try:
        with stop_signals() as stop:
            if evaluation.at_start and held_out and not run.step:
                passes: list[FeedbackPasses] = [0] if run.schedule.switch_on is None else evaluation.feedback_passes
                validation = evaluate(run, held_out, passes, trackers, watcher)
            if run.unlogged:
                log(run, trackers, run.unlogged)
                run.save(run.pending)
            if run.pending and held_out and validation_due(run):  # a kill came between the save and the validation of its step
                validation = evaluate(run, held_out, passes_to_evaluate(run), trackers, watcher)
                if save_due(run):
                    run.validated(lowest(validation))
                else:
                    run.save()
            while not (ending := stopped(run, stop)) and run.step < config.steps:
                with run.kept():
                    # 1. Look whether the states settle, if the schedule adapts to that.
                    before = run.loader.state_dict(), run.schedule.state_dict()
                    batch = run.loader.next_batch()
                    settling = adapt_schedule(run, batch)

                    # 2. Gradients of Eq. 12 over this step's passes.
                    run.optimizer.zero_grad()
                    z_loss = run.optimizer.z_loss(run.step)
                    report = accumulate_gradients(run.model, batch, run.step, run.schedule, config, z_loss, run.parallel)
                    if not math.isfinite(report.objective + report.gradient_norm):
                        raise diverged(run, report, *before)

                # 3. Update: right after the switch-on perhaps only the fusion.
                if run.schedule.warming_fusion(run.step):
                    run.optimizer.only(is_fusion)
                run.optimizer.step(run.step)
                run.milestones.update(run.step, report)
                run.step += 1
                run.tokens += report.tokens
                run.token_equivalent += report.token_equivalent
                run.executed_positions += report.executed_positions

                # 4. Log; save, so that nothing a validation does can lose the run; validate.
                evaluate_now, save_now = bool(held_out) and validation_due(run), save_due(run)
                values = step_values(run, report) | settling
                values["tokens_per_second"] = (run.tokens - tokens_before) / (time.perf_counter() - start)
                if watcher:
                    with suppress(OSError):
                        watcher.stepped(run, values)
                if run.step % config.log_every == 0 or settling or run.step == config.steps:
                    with run.kept(pending=evaluate_now, unlogged=values):
                        log(run, trackers, values)
                if save_now:
                    checkpoint = run.save(pending=evaluate_now)
                if evaluate_now:
                    validation = evaluate(run, held_out, passes_to_evaluate(run), trackers, watcher)
                    if save_now:
                        run.validated(lowest(validation))
            if ending:
                checkpoint = run.save()
    finally:
        for tracker in trackers:
            tracker.close()
    assert checkpoint is not None
    return result_of(run, checkpoint, validation, time.perf_counter() - start, stop)


def stopped(run: Run, stop: StopRequest) -> bool:
    """Whether a rank was asked to stop: then all of them stop after the same step."""
    stop.signal = run.parallel.agree(stop.signal)
    return bool(stop)


def adapt_schedule(run: Run, batch: Any) -> dict[str, Any]:
    """Where the schedule is adaptive and a measurement is due: measure on this batch's rows, adjust, say what was found."""
    adaptive = run.schedule.adaptive
    on = run.schedule.switch_on
    if adaptive is None or on is None or run.step < on or not adaptive.due(run.step):
        return {}
    rows = batch.rows(0, min(adaptive.config.rows, batch.tokens.shape[0])).to(run.device)
    limits = adaptive.config.passes, adaptive.config.tolerance
    settling = run.parallel.observe(measure_settling, run.model, rows.tokens, *limits, rows.layout.with_plain(None))
    adaptive.update(settling, run.schedule.probabilities(run.step))
    return {
        "deeper_share": adaptive.share,
        "change_ratio_median": settling.ratio_median if settling.measurable else None,
        "change_ratio_p99": settling.ratio_p99 if settling.measurable else None,
        "passes_needed": settling.passes_needed,
    }


def evaluate(
    run: Run, held_out: list[Batch], passes: list[FeedbackPasses], trackers: list[Tracker], watcher: Watcher | None
) -> dict[str, float]:
    """Held-out losses by feedback passes, logged with the last step that was done."""
    with run.kept(pending=True):
        losses = run.parallel.observe(validation_losses, run.model, held_out, passes, run.recipe.train.dtype)
        log(run, trackers, {"validation": losses})
    if watcher:
        with suppress(OSError):
            watcher.evaluated(run, losses)
    return losses


def validation_due(run: Run) -> bool:
    return run.step % run.recipe.evaluation.every == 0 or run.step == run.recipe.train.steps


def save_due(run: Run) -> bool:
    return run.step % run.recipe.train.checkpoint_every == 0 or run.step == run.recipe.train.steps


def passes_to_evaluate(run: Run) -> list[FeedbackPasses]:
    """The recipe's feedback passes; 0 alone before feedback has been switched on."""
    on = run.schedule.switch_on
    return run.recipe.evaluation.feedback_passes if on is not None and run.step > on else [0]


def step_values(run: Run, report: StepReport) -> dict[str, Any]:
    """What is logged of a step; everything but `tokens_per_second` is reproducible bit for bit."""
    lr = run.optimizer.lr(run.step - 1)
    return {
        "passes": report.passes,
        "objective": report.objective,
        **report.losses(),
        "gradient_norm": report.gradient_norm,
        "loss_weight": run.schedule.loss_weight(run.step - 1),
        "matrix_lr": lr["normuon"],
        "adam_lr": lr["adam"],
        "tokens": run.tokens,
        "token_equivalent_compute": run.token_equivalent,
        "executed_positions": run.executed_positions,
        "switch_on_step": run.milestones.switch_on_step,
        "switch_on_shock": run.milestones.shock,
        "crossover_step": run.milestones.crossover_step,
    }


def log(run: Run, trackers: list[Tracker], values: dict[str, Any]) -> None:
    """Values of the last step that was done; rank 0 has the trackers."""

    def write() -> None:
        for tracker in trackers:
            tracker.log(run.step - 1, values)

    run.parallel.from_main(write)


def lowest(losses: dict[str, float]) -> float | None:
    """The smallest of the losses that are finite: many passes may diverge where few do not."""
    return min((loss for loss in losses.values() if math.isfinite(loss)), default=None)


def diverged(run: Run, report: StepReport, loader: dict[str, Any], schedule: dict[str, Any]) -> DivergedError:
    """Save the state before this step, `loader` and `schedule` included (nothing else has changed yet), and say where it happened."""
    run.loader.load_state_dict(loader)
    run.schedule.load_state_dict(schedule)
    what, value = ("loss", report.objective) if not math.isfinite(report.objective) else ("gradient norm", report.gradient_norm)
    if run.is_finite():
        kept = f"the state before this step is kept in {run.save()}"
    else:  # the update before overflowed
        kept = f"the parameters are not finite either; the last good state is {run.checkpoints.last() or 'not saved'}"
    return DivergedError(f"step {run.step}: the {what} is {value}; {kept}")


def result_of(run: Run, checkpoint: Path, validation: dict[str, float], seconds: float, stop: StopRequest) -> RunResult:
    complete = run.step >= run.recipe.train.steps
    return RunResult(
        run.folder,
        checkpoint,
        run.step,
        run.tokens,
        run.token_equivalent,
        run.executed_positions,
        validation,
        run.milestones,
        seconds,
        None if complete else stop.signal,
        run.parallel.main,
    )
