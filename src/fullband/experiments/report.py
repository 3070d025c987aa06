"""results/NAME: README.md with the tables, result.json, pictures, and the compressed logs of every job."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fullband.config import TaskSource
from fullband.data.tasks import build_task
from fullband.experiments.config import Experiment
from fullband.experiments.jobs import Job, finished_results, logs_of
from fullband.experiments.summary import summarise
from fullband.files import write_bytes, write_json
from fullband.plots.experiment import plot_experiment
from fullband.plots.probe import CHANCE, LABELS
from fullband.plots.style import passes_label
from fullband.shipped import RUN_RECIPE

RESULTS = Path("results")
PICTURE = "summary"
SPENT_COLUMNS = (  # key of what a cell spent, title, how it is written, unit
    ("steps", "steps", "{:,.0f}", 1),
    ("tokens", "tokens", "{:.3f}M", 1e6),
    ("token_equivalent", "tokens × passes", "{:.3f}M", 1e6),
    ("executed_positions", "positions executed", "{:.3f}M", 1e6),
    ("executed_flops", "FLOPs executed", "{:.2e}", 1),
    ("seconds", "seconds", "{:.0f}", 1),
    ("processor_seconds", "processor seconds", "{:.0f}", 1),
    ("measuring_seconds", "seconds to measure", "{:.0f}", 1),
)


def write_report(experiment: Experiment, jobs: Sequence[Job], folder: Path, command: str) -> dict[str, Any]:
    """Write what the finished jobs found into `folder`, and return it (result.json). Raises ValueError if none is finished."""
    results = finished_results(experiment, jobs)
    if not results:
        raise ValueError(f"{experiment.name}: no cell is finished yet, there is nothing to report")
    found = summarise(experiment, results) | {"chance": chance_of(experiment, jobs), "command": command}
    finished = {(result["cell"], result["seed"]) for result in results}
    keep_logs([job for job in jobs if (job.cell.name, job.seed) in finished], folder / "logs")
    write_json(folder / "result.json", found)
    plot_experiment(found, [folder / f"{PICTURE}.png"])
    write_bytes(folder / "README.md", readme(found).encode())
    return found


def keep_logs(jobs: Sequence[Job], folder: Path) -> None:
    """A folder for each job: its recipe, its other files compressed; and SHA256SUMS of all of them (`sha256sum -c SHA256SUMS`)."""
    for job in jobs:
        kept = folder / job.name
        kept.mkdir(parents=True, exist_ok=True)
        for path in logs_of(job):
            content = path.read_bytes()
            if path.name == RUN_RECIPE:
                write_bytes(kept / path.name, content)
            else:
                write_bytes(kept / f"{path.name}.gz", gzip.compress(content, mtime=0))  # the same bytes for the same log
    sums = [(hashlib.sha256(path.read_bytes()).hexdigest(), path) for path in sorted(folder.glob("*/*")) if path.is_file()]
    write_bytes(folder / "SHA256SUMS", "".join(f"{digest}  {path.relative_to(folder).as_posix()}\n" for digest, path in sums).encode())


def chance_of(experiment: Experiment, jobs: Sequence[Job]) -> float | None:
    """Accuracy of guessing in what is measured; None for losses, and where cells have tasks of different chance."""
    if experiment.measure.kind == "probe":
        return CHANCE
    sources = [job.recipe.data.source for job in jobs]
    chances = {build_task(source).chance if isinstance(source, TaskSource) else None for source in sources}
    return chances.pop() if experiment.measure.kind == "positions" and len(chances) == 1 else None


def readme(found: Mapping[str, Any]) -> str:
    """The report in Markdown. A table over fewer than three seeds is headed as a smoke test, and nothing is concluded from it."""
    heading = f"# Smoke test: {found['title']}" if found["smoke_test"] else f"# {found['title']}"
    warning = "Fewer than three seeds: these numbers show that the experiment runs, and support no claim.\n"
    parts = [heading, "", found["question"], "", f"    {found['command']}", ""]
    parts += [warning] * found["smoke_test"]
    parts += [f"![summary]({PICTURE}.png)", "", *_numbers(found), *_comparisons(found), *_cells(found), *_compute(found)]
    parts += [f"- {note}" for note in found["notes"]] + [""] * bool(found["notes"])
    if found["unfinished"]:
        parts += [f"Not run, and not in any table: {'; '.join(found['unfinished'])}.", ""]
    parts += [
        "Logs (gzip, hashes in SHA256SUMS) and recipes of every job: [logs](logs); "
        "`fullband plot` draws their learning curves. By seed: [result.json](result.json)."
    ]
    return "\n".join(parts) + "\n"


def cell_of(value: Mapping[str, Any]) -> str:
    half = value["half_width"]
    return f"{value['mean']:.3f}" + ("" if half is None else f" ± {half:.3f}")


def seeds_of(found: Mapping[str, Any], name: str) -> str:
    seeds = next(cell["seeds"] for cell in found["cells"] if cell["cell"] == name)
    return f"{len(seeds)} ({', '.join(map(str, seeds))})"


def unit(found: Mapping[str, Any]) -> str:
    kind = found["measure"]["kind"]
    if kind == "positions":
        return f"Share of correct answers at a position (counted from 1), {found['measure']['rows']:,} held-out sequences a seed"
    return {"settling": "Held-out loss, nats a token", "probe": "Accuracy of a linear probe at the input of the stack; chance is 0.5"}[kind]


def _numbers(found: Mapping[str, Any]) -> list[str]:
    words = partial(evaluation_words, kind=found["measure"]["kind"])
    columns = list(found["rows"][0]["columns"])
    headings = [f"position {column}" if found["measure"]["kind"] == "positions" else column for column in columns]
    rows = [
        [row["cell"], words(row["reading"]), seeds_of(found, row["cell"]), *(cell_of(row["columns"][column]) for column in columns)]
        for row in found["rows"]
    ]
    about = f"{unit(found)}; mean ± half of the 95% interval over seeds (Student's t)."
    return [about, "", *_table(["cell", "evaluation", "n (seeds)", *headings], rows)]


def evaluation_words(evaluation: str, kind: str) -> str:
    """ "fused-4" is "4 feedback passes": the cell's name says of what. Probes have ways of prefilling."""
    if kind == "probe":
        return LABELS[evaluation]
    name, comma, control = evaluation.partition(", ")
    return passes_label("0" if name == "standard" else name.removeprefix("fused-")) + comma + control


def _comparisons(found: Mapping[str, Any]) -> list[str]:
    if not found["comparisons"]:
        return []
    words = partial(evaluation_words, kind=found["measure"]["kind"])
    rows = [
        [
            f"{c['cell']}, {words(c['reading'])}",
            f"{c['to']}, {words(c['to_reading'])}",
            f"{c['n']} ({', '.join(map(str, c['seeds']))})",
            column,
            f"{value['mean']:+.3f} ± {value['half_width']:.3f}",
            value["shows"],
        ]
        for c in found["comparisons"]
        for column, value in c["columns"].items()
    ]
    return ["## Differences, paired by seed", "", *_table(["", "minus", "n (seeds)", "of", "difference, 95% interval", "shows"], rows)]


def _cells(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for cell in found["cells"]:
        changed = ", ".join(f"`{key}: {value}`" for key, value in cell["set"].items())
        equal = f"; steps by equal {' and '.join(cell['equal']['by'])} to {cell['equal']['cell']}" if cell["equal"] else ""
        none = "not yet" if any(shock is not None for shock in cell["switch_on_shock"]) else "-"
        verdicts = ", ".join(str(verdict) for verdict in cell["verdicts"] if verdict) or "-"
        rows.append(
            [
                cell["cell"],
                cell["about"],
                (changed or "as the recipe") + equal,
                _each(cell["switch_on_shock"], "+.2f"),
                _each(cell["crossover_step"], ",", none),
                verdicts,
            ]
        )
    head = ["cell", "what it is", "changed", "switch-on shock, nats", "crossover, step", "verdict"]
    return ["## Cells", "", *_table(head, rows)]


def _each(values: Sequence[float | None], spec: str, missing: str = "-") -> str:
    return ", ".join(missing if value is None else format(value, spec) for value in values)


def _compute(found: Mapping[str, Any]) -> list[str]:
    rows = [[cell["cell"], *(form.format(cell["spent"][key] / unit) for key, _, form, unit in SPENT_COLUMNS)] for cell in found["cells"]]
    head = ["cell", *(title for _, title, _, _ in SPENT_COLUMNS)]
    machines = "; ".join(
        f"{h['device']} on {h['machine']}, {h['cores']} cores, {h['threads']} thread(s), torch {h['versions']['torch']}"
        for h in found["hardware"]
    )
    resumed = ""
    if any(c["resumed"] for c in found["cells"]):
        resumed = " Seconds are means over the runs that were not resumed, where there is one; else they are those of the last sitting."
    return [
        "## Compute spent, a seed (mean)",
        "",
        *_table(head, rows),
        f"Hardware: {machines}. FLOPs by formula. Seconds are wall time, whatever else the machine did; processor seconds are the "
        f"training's own.{resumed} {_altogether(found)}",
        "",
    ]


def _altogether(found: Mapping[str, Any]) -> str:
    """Minutes of all jobs in the tables, by the cells' means."""
    jobs = sum(len(cell["seeds"]) for cell in found["cells"])
    trained, measured = (
        sum(len(cell["seeds"]) * cell["spent"][key] for cell in found["cells"]) / 60 for key in ("processor_seconds", "measuring_seconds")
    )
    return f"All {jobs} jobs: {trained:.0f} minutes of processor time to train, {measured:.0f} minutes to measure."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]
