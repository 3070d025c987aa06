"""`fullband plot`: the paper's figures from run, diagnosis and probe folders. What each shows is said here once; how, in its own module."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from fullband.files import write_bytes
from fullband.plots.chart import SCRIPT, STYLE, Axis, Line, Mark, line_chart
from fullband.plots.curves import Curve, curves_chart, plot_curves
from fullband.plots.diagnosis_page import change_chart, loss_chart, reach
from fullband.plots.page import stylesheet
from fullband.plots.passes import passes_chart, passes_lines, plot_passes
from fullband.plots.probe import KEYS, LABELS, TITLES, plot_depths, plot_registers
from fullband.plots.reachability import plot_reachability
from fullband.plots.runs import RunRecord, read_run
from fullband.plots.settling import plot_settling
from fullband.train.metrics import METRICS

TEMPLATE = Path(__file__).with_name("gallery.html")
DIAGNOSIS, PROBE = "diagnosis.json", "results.json"
DIAGNOSIS_KEYS = {"trace": dict, "settings": dict, "reach": list, "verdict": str, "model": str}
PROBE_KEYS = {"settings": list}
SUFFIXES = (".png", ".svg")
LONG = 1000  # passes from which a settling picture is the paper's Fig. 10 and not its Fig. 3


@dataclass(frozen=True)
class Figure:
    """`name` is the stem of its files; `draw` writes them, `html` is what the page shows in its place."""

    name: str
    title: str
    caption: str
    draw: Callable[[Sequence[Path]], None]
    html: str


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
        for file, kept, keys in ((DIAGNOSIS, diagnoses, DIAGNOSIS_KEYS), (PROBE, probes, PROBE_KEYS)):
            if (folder / file).is_file():
                _check_name(folder, name, kept)
                kept[name] = _read(folder / file, keys)
                held = True
        if (folder / METRICS).is_file():
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


def figures_of(sources: Sources) -> list[Figure]:
    """The figures that these sources allow, in the paper's order; learning curves last."""
    found = [figure for name, diagnosis in sources.diagnoses.items() for figure in _diagnosis_figures(name, diagnosis)]
    lines = passes_lines(sources.runs)
    if lines:
        found.append(
            Figure(
                "figure-4-left",
                "Fig. 4, left: loss by feedback passes",
                "Held-out loss at the last evaluation of each run; 0 is plain reading.",
                lambda paths: plot_passes(lines, paths),
                passes_chart(lines),
            )
        )
    found += [figure for name, probe in sources.probes.items() for figure in _probe_figures(name, probe)]
    return sorted(found, key=lambda figure: int(figure.name.split("-")[1].rstrip("ab"))) + [_curves_figure(run) for run in sources.runs]


def write_gallery(sources: Sources, folder: Path) -> list[str]:
    """Write every figure as PNG and SVG, and index.html, into `folder`; returns the figures' names. Raises ValueError if there are none."""
    figures = figures_of(sources)
    if not figures:
        raise ValueError("nothing to draw: these folders hold no measurement")
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        figure.draw([folder / f"{figure.name}{suffix}" for suffix in SUFFIXES])
    write_bytes(folder / "index.html", page(figures).encode())
    return [figure.name for figure in figures]


def page(figures: Sequence[Figure]) -> str:
    """One page that opens offline: a chart with the values under the pointer for each figure."""
    sections = "".join(
        f'<section id="{escape(figure.name)}"><h2>{escape(figure.title)}</h2>{figure.html}'
        f"<figcaption>{escape(figure.caption)}</figcaption></section>"
        for figure in figures
    )
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        stylesheet=stylesheet(),
        chart_style=STYLE.read_text(encoding="utf-8"),
        chart_script=SCRIPT.read_text(encoding="utf-8"),
        sections=sections,
    )


def _read(path: Path, keys: Mapping[str, type]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None
    for key, kind in keys.items():
        if not isinstance(found, dict) or not isinstance(found.get(key), kind):
            raise ValueError(f"{path}: has no '{key}'; it was not written by diagnose or probe")
    return found


def _diagnosis_figures(name: str, diagnosis: Mapping[str, Any]) -> list[Figure]:
    trace = diagnosis["trace"]
    number = 10 if diagnosis["settings"]["passes"] >= LONG else 3
    figures = [
        Figure(
            f"figure-{number}-{name}",
            f"Fig. {number}: loss and state change by pass, {name}",
            f"Verdict: {diagnosis['verdict']}. {trace['rows']} rows of {trace['length']} positions, {trace['records'][-1]['k']} passes.",
            lambda paths: plot_settling(diagnosis, paths),
            loss_chart(trace) + change_chart(trace, "relative"),
        )
    ]
    if diagnosis["reach"]:
        caption = f"Model: {diagnosis['model']}."
        figures.append(
            Figure(
                f"figure-1-{name}",
                f"Fig. 1, measured: what moves a state, {name}",
                caption,
                lambda paths: plot_reachability(diagnosis, paths),
                reach(diagnosis),
            )
        )
    return figures


def _probe_figures(name: str, probe: Mapping[str, Any]) -> list[Figure]:
    single = [setting for setting in probe["settings"] if setting["task"] in TITLES]
    registers = [setting for setting in probe["settings"] if setting["task"] == "registers"]
    caption = "Held-out accuracy of a linear probe at the last token; chance is 0.5. What can be decoded need not be used."
    figures = []
    if single:
        charts = "".join(f"<h3>{escape(TITLES[setting['task']])}</h3>{_depth_chart(setting)}" for setting in single)
        title = f"Fig. 7a: what each depth knows, {name}"
        figures.append(Figure(f"figure-7a-{name}", title, caption, lambda paths: plot_depths(single, paths), charts))
    if registers:
        charts = "".join(f"<h3>{escape(setting['setting'])}</h3>{_depth_chart(setting)}" for setting in registers)
        title = f"Fig. 7b: several registers, {name}"
        figures.append(Figure(f"figure-7b-{name}", title, caption, lambda paths: plot_registers(registers, paths), charts))
    return figures


def _depth_chart(setting: Mapping[str, Any]) -> str:
    lines = [
        Line(
            KEYS[prefill["prefill"]],
            LABELS[prefill["prefill"]],
            [depth["depth"] for depth in prefill["depths"]],
            [depth["accuracy"] for depth in prefill["depths"]],
        )
        for prefill in setting["prefills"]
    ]
    deepest = max(line.x[-1] for line in lines)
    x = Axis("depth (0 = input of the stack)", 0, deepest, range(0, int(deepest) + 1, -(-int(deepest) // 9) or 1), prefix="depth ")
    y = Axis("probe accuracy", 0.4, 1.04, (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), digits=3)
    return line_chart(setting["setting"], lines, [Mark("chance", y=0.5)], x, y)


def _curves_figure(run: RunRecord) -> Figure:
    model = "standard" if run.switch_on_step is None else "fullband"
    curves: dict[str, list[Curve]] = {model: run.curves}
    milestones = {"switch_on_step": run.switch_on_step} | {key: run.last[key] for key in ("switch_on_shock", "crossover_step")}
    return Figure(
        f"learning-curves-{run.name}",
        f"Learning curves by pass, {run.name}",
        "A running mean, with the logged values behind it. Shock: how much worse the second pass is than the first over the same "
        "positions, when it is first used. Crossover: where its running mean falls below the first's.",
        lambda paths: plot_curves(curves, paths, milestones),
        curves_chart(curves, milestones),
    )
