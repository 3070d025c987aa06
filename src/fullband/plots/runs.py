"""Training runs side by side, from their folders: what each paid (shock), when it paid off (crossover), and their losses at equal compute.

Equal compute is equal token-equivalent compute, tokens x passes (section 4): the smallest that all the runs reached. A loss at some
compute is that of the last evaluation up to there, never an interpolation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from fullband.plots.curves import Curve, Steps, compute_at, read_curves, steps_of
from fullband.strict import parse, shape
from fullband.training.metrics import METRICS, has_metrics, read_metrics

_SPENT = dict.fromkeys(("tokens", "token_equivalent_compute", "executed_positions"), float)
_MILESTONES = {"switch_on_shock": float | None, "crossover_step": int | None}
_STEP = shape("Step", step=int, passes=Annotated[int, Field(ge=1)], **_SPENT, **_MILESTONES)  # what is used, beside the losses
_EVALUATED = shape("Evaluated", step=int, validation=Annotated[dict[str, float], Field(min_length=1)])
RECIPE, CHECKPOINTS, TRAINING = "recipe.yaml", "checkpoints", "training.json"
ORDER = ("shuffle",)  # of a fingerprint: changes in which order documents come, not which


@dataclass(frozen=True)
class Evaluation:
    """Held-out losses (nats a token) by feedback passes after `step` + 1 steps, and what had been spent until then."""

    step: int
    compute: float
    tokens: float
    losses: dict[str, float]


@dataclass(frozen=True)
class RunRecord:
    """What a run's metrics.jsonl says. `switch_on_step` is the first step with more than one pass; in older
    files, which do not say it, the first such step that was logged. `data` is as `run_data` finds it."""

    name: str
    curves: list[Curve]
    evaluations: list[Evaluation]
    last: dict[str, Any]
    switch_on_step: int | None
    data: dict[str, str] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)

    def last_within(self, amount: Literal["compute", "tokens"], most: float) -> dict[str, Any] | None:
        """The last evaluation that cost no more than `most` (and half a step of rounding)."""
        fitting = [vars(e) for e in self.evaluations if getattr(e, amount) <= most * (1 + 1e-6)]
        return fitting[-1] if fitting else None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "steps": self.last["step"] + 1,
            **{key: self.last[key] for key in (*_SPENT, *_MILESTONES)},
            "switch_on_step": self.switch_on_step,
            "held_out_crossover_step": held_out_crossover(self.evaluations),
            "training_loss": {f"pass_{curve.k}": curve.smooth[-1] for curve in self.curves},
            "evaluations": [vars(e) for e in self.evaluations],
        }


def read_run(folder: Path) -> RunRecord:
    """The record of a run folder. Raises ValueError if it holds no run, one that has logged no step, or another program's numbers."""
    path = folder / METRICS
    if not has_metrics(folder):
        raise ValueError(f"{folder}: not a run folder (it has no {METRICS})")
    entries = read_metrics(path)
    steps = [entry for entry in entries if "objective" in entry]
    if not steps:
        raise ValueError(f"{path}: no step has been logged yet")
    if missing := [key for key in ("passes", *_SPENT, *_MILESTONES) if key not in steps[-1]]:
        raise ValueError(f"{path}: its steps do not say '{missing[0]}'; it was not written by this program")
    for entry in entries:
        _check_entry(path, entry)
    curves = read_curves(folder)
    evaluations = []
    for entry in entries:
        if "validation" in entry:
            compute = compute_at(curves, entry["step"])
            assert compute is not None
            tokens = steps[-1]["tokens"] * (entry["step"] + 1) / (steps[-1]["step"] + 1)
            evaluations.append(Evaluation(entry["step"], compute, tokens, entry["validation"]))
    logged = next((entry["step"] for entry in steps if entry["passes"] > 1), None)
    switched = steps[-1].get("switch_on_step", logged)
    return RunRecord(folder.resolve().name, curves, evaluations, steps[-1], switched, data_of_run(folder), steps_of(entries))


def _check_entry(path: Path, entry: dict[str, Any]) -> None:
    """Raises ValueError."""
    where = f"{path}: step {entry['step']}"
    if "validation" in entry:
        parse(_EVALUATED, entry, where)
    if "objective" in entry:
        parse(_STEP, entry, where)
        for k in range(1, entry["passes"] + 1):
            loss = entry.get(f"loss_pass_{k}")
            if not isinstance(loss, (int, float)):
                raise ValueError(f"{where}: loss_pass_{k} must be a number, got {loss!r}")


def compare(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """All that the table and the page show, as JSON."""
    equal = min(run.last["token_equivalent_compute"] for run in runs)
    tokens = min(run.last["tokens"] for run in runs)
    found = [
        run.to_json() | {"at_equal_compute": run.last_within("compute", equal), "at_equal_tokens": run.last_within("tokens", tokens)}
        for run in runs
    ]
    return {"equal_compute": equal, "equal_tokens": tokens, "runs": found, "differing_data": differing_of(runs)}


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """Their names, numbered where two have the same."""
    names = [run.name for run in runs]
    return [f"{name} {n}" if names.count(name) > 1 else name for n, name in enumerate(names, start=1)]


def differing_of(runs: Sequence[RunRecord]) -> list[str]:
    """What differs between the data of these runs, in words; empty for the same data."""
    return differing_data({name: run.data for name, run in zip(names_of(runs), runs, strict=True)})


def held_out_crossover(evaluations: Sequence[Evaluation]) -> int | None:
    """The step of the first evaluation from which on held-out loss with feedback passes, at its best number of them, stayed below that
    without; None if it does not end below, or was never evaluated both ways."""
    found = None
    for evaluation in reversed(evaluations):
        if is_both_ways(evaluation):
            if not min(_fed(evaluation)) < evaluation.losses["0"]:
                return found
            found = evaluation.step
    return found


def is_both_ways(evaluation: Evaluation) -> bool:
    """Whether it says a loss with feedback passes and one without."""
    return "0" in evaluation.losses and bool(_fed(evaluation))


def _fed(evaluation: Evaluation) -> list[float]:
    return [loss for passes, loss in evaluation.losses.items() if passes != "0"]


def data_of_run(folder: Path) -> dict[str, str]:
    """What decides a run's data, in words: as its newest checkpoint says, files by their contents, and as its recipe does, under "recipe".
    Empty where neither says it."""
    recipe = _mapping(folder / RECIPE)
    pointer = _mapping(folder / CHECKPOINTS / "last.json")
    identity = _mapping(folder / CHECKPOINTS / str(pointer.get("checkpoint", "")) / TRAINING).get("identity")
    found = identity.get("data") if isinstance(identity, dict) else None
    known = {key: str(value) for key, value in found.items() if key not in ORDER} if isinstance(found, dict) else {}
    if recipe.get("data"):
        known["recipe"] = json.dumps(recipe["data"], sort_keys=True, default=str)
    evaluation = recipe.get("evaluation")
    if isinstance(evaluation, dict) and "rows" in evaluation:
        known["held-out rows"] = str(evaluation["rows"])
    return known


def differing_data(runs: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What differs between the data of runs (by name), a line for each thing; runs of which nothing is known are left out of it."""
    known = {name: data for name, data in runs.items() if data}
    fingerprints = all(data.keys() - {"recipe", "held-out rows"} for data in known.values())
    keys = dict.fromkeys(key for data in known.values() for key in data)
    found = []
    for key in keys:
        if key != "held-out rows" and (key == "recipe") == fingerprints:
            continue  # a recipe may name the same files in other words: it counts only where a run has nothing better
        held = {name: data.get(key, "none") for name, data in known.items()}
        if len(set(held.values())) > 1:
            found.append(f"{key}: " + "; ".join(f"{value} ({name})" for name, value in held.items()))
    return found


def _mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}  # it only helps: what is compared are the run's own numbers
    return found if isinstance(found, dict) else {}
