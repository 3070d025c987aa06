"""What `fullband plot` draws from: run folders, diagnoses and probes, found in the folders that were named, and checked."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fullband.config import parse
from fullband.plots.runs import RunRecord, read_run
from fullband.training.metrics import METRICS, has_metrics

DIAGNOSIS, PROBE = "diagnosis.json", "results.json"
Number = float | None  # null where it was not measured or is not finite


class _Part(BaseModel):
    """Of a file: the keys that are drawn, whatever else is there."""

    model_config = ConfigDict(strict=True)


class _Change(_Part):
    relative: Number
    absolute: Number
    p99: Number


class _Record(_Part):
    k: int
    loss: Number
    loss_past: Number
    change: _Change | None
    change_front: _Change | None
    change_past: _Change | None


class _Trace(_Part):
    rows: int
    length: int
    horizon: int
    records: list[_Record] = Field(min_length=1)
    loss_exact: Number
    loss_exact_past: Number


class _Grid(_Part):
    mode: Literal["standard", "soft"]
    layers: list[int] = Field(min_length=1)
    prompt: int
    unexpected: int
    influence: list[list[list[Number]]]


class _Passes(_Part):
    passes: int


class Diagnosis(_Part):
    """diagnosis.json."""

    verdict: str
    model: str
    settings: _Passes
    trace: _Trace
    reach: list[_Grid]


class _Depth(_Part):
    depth: int
    accuracy: float
    stderr: float
    moved: Number


class _Prefill(_Part):
    prefill: Literal["standard", "1", "2", "4", "full"]
    depths: list[_Depth] = Field(min_length=1)


class _Setting(_Part):
    task: str
    setting: str
    registers: int | None = None
    writes_each: int | None = None
    prefills: list[_Prefill] = Field(min_length=1)


class Probe(_Part):
    """A probe's results.json."""

    settings: list[_Setting]


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
        for file, kept, schema in ((DIAGNOSIS, diagnoses, Diagnosis), (PROBE, probes, Probe)):
            if (folder / file).is_file():
                _check_name(folder, name, kept)
                kept[name] = _read(folder / file, schema)
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


def _read(path: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """The file as it is: `schema` says what must be there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None
    parse(schema, found, f"{path}: not as diagnose or probe writes it")
    assert isinstance(found, dict)
    return found
