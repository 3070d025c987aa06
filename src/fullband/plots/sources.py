"""What `fullband plot` draws from: run folders, diagnoses and probes, found in the folders that were named, and checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fullband.files import read_json
from fullband.plots.runs import RunRecord, read_run
from fullband.strict import list_of, parse, shape
from fullband.training.metrics import METRICS, has_metrics

DIAGNOSIS, PROBE = "diagnosis.json", "results.json"

# What is drawn of the files, whatever else they hold.
Number = float | None  # null where it was not measured or is not finite

_CHANGE = shape("Change", relative=Number, absolute=Number, p99=Number)
_RECORD = shape(
    "Record", k=int, loss=Number, loss_past=Number, change=_CHANGE | None, change_front=_CHANGE | None, change_past=_CHANGE | None
)
_TRACE = shape("Trace", rows=int, length=int, horizon=int, records=list_of(_RECORD, 1), loss_exact=Number, loss_exact_past=Number)
_GRID = shape(
    "Grid",
    mode=Literal["standard", "soft"],
    layers=list_of(int, 1),
    prompt=int,
    unexpected=int,
    influence=list[list[list[Number]]],
)
_DEPTH = shape("Depth", depth=int, accuracy=float, stderr=float, moved=Number)
_PREFILL = shape("Prefill", prefill=Literal["standard", "1", "2", "4", "full"], depths=list_of(_DEPTH, 1))
_SETTING = shape(
    "Setting", task=str, setting=str, registers=(int | None, None), writes_each=(int | None, None), prefills=list_of(_PREFILL, 1)
)
SCHEMAS = {
    DIAGNOSIS: shape("Diagnosis", verdict=str, model=str, settings=shape("Settings", passes=int), trace=_TRACE, reach=list_of(_GRID)),
    PROBE: shape("Probe", settings=list_of(_SETTING)),
}


@dataclass(frozen=True)
class Sources:
    """What the named folders hold, by folder name."""

    runs: list[RunRecord]
    diagnoses: dict[str, dict[str, Any]]
    probes: dict[str, dict[str, Any]]


def read_sources(folders: Sequence[Path]) -> Sources:
    """Raises ValueError for a folder that holds nothing to draw, two whose figures would have one name, and a file of another kind."""
    runs: list[RunRecord] = []
    diagnoses: dict[str, dict[str, Any]] = {}
    probes: dict[str, dict[str, Any]] = {}
    for place, folder in {folder.resolve(): folder for folder in folders}.items():
        name, held = place.name, False
        for file, kept in ((DIAGNOSIS, diagnoses), (PROBE, probes)):
            if (folder / file).is_file():
                _check_name(folder, name, kept)
                kept[name] = _read(folder / file)
                held = True
        if has_metrics(folder):
            _check_name(folder, name, [run.name for run in runs])
            runs.append(read_run(folder))
            held = True
        if not held:
            written = f"what diagnose or probe wrote with --output ({DIAGNOSIS}, {PROBE})"
            raise ValueError(f"{folder}: nothing to draw; name a run folder ({METRICS}) or {written}")
    return Sources(runs, diagnoses, probes)


def _check_name(folder: Path, name: str, others: Collection[str]) -> None:
    if name in others:
        raise ValueError(f"{folder}: another folder is called '{name}' too, and so would its figures be; draw them into two folders")


def _read(path: Path) -> dict[str, Any]:
    """The file as it is; its schema says what must be there."""
    found: dict[str, Any] = read_json(path)
    parse(SCHEMAS[path.name], found, f"{path}: not as diagnose or probe writes it")
    return found
