"""`fullband plot`: the paper's figures from run, diagnosis and probe folders. What each shows is said here once; how, in its own module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from fullband.files import write_bytes
from fullband.plots.chart import SCRIPT, STYLE, Axis, Line, Mark, line_chart
from fullband.plots.curves import Curve, curves_charts, plot_curves
from fullband.plots.diagnosis_page import change_chart, loss_chart, reach
from fullband.plots.markers import MOST_RUNS
from fullband.plots.numbers import finite
from fullband.plots.page import stylesheet
from fullband.plots.passes import PassesLine, passes_chart, passes_lines, plot_passes
from fullband.plots.probe import CHANCE, KEYS, LABELS, TITLES, plot_depths, plot_registers
from fullband.plots.reachability import plot_reachability
from fullband.plots.runs import RunRecord
from fullband.plots.settling import plot_settling
from fullband.plots.sources import Sources

TEMPLATE = Path(__file__).with_name("gallery.html")
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


def figures_of(sources: Sources) -> list[Figure]:
    """The figures that these sources allow, in the paper's order; learning curves last."""
    found = [figure for name, diagnosis in sources.diagnoses.items() for figure in _diagnosis_figures(name, diagnosis)]
    lines = passes_lines(sources.runs)
    found += [_passes_figure(lines[first : first + MOST_RUNS], first, len(lines)) for first in range(0, len(lines), MOST_RUNS)]
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


def _passes_figure(lines: Sequence[PassesLine], first: int, all_lines: int) -> Figure:
    """Of as many runs as a picture can tell apart, from run `first` on."""
    part = "" if all_lines <= MOST_RUNS else f", runs {first + 1} to {first + len(lines)} of {all_lines}"
    return Figure(
        "figure-4-left" + (f"-{first // MOST_RUNS + 1}" if first else ""),
        f"Fig. 4, left: loss by feedback passes{part}",
        "Held-out loss at the last evaluation of each run; 0 is without feedback.",
        lambda paths: plot_passes(lines, paths),
        passes_chart(lines),
    )


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
    tenths = range(min(4, int(10 * min(finite(y for line in lines for y in line.y), default=1.0))), 11)
    y = Axis("probe accuracy", tenths[0] / 10, 1.04, [tenth / 10 for tenth in tenths], digits=3)
    return line_chart(setting["setting"], lines, [Mark("chance", y=CHANCE)], x, y)


def _curves_figure(run: RunRecord) -> Figure:
    model = "standard" if run.switch_on_step is None else "fullband"
    curves: dict[str, list[Curve]] = {model: run.curves}
    steps = {model: run.steps}
    milestones = {"switch_on_step": run.switch_on_step} | {key: run.last[key] for key in ("switch_on_shock", "crossover_step")}
    return Figure(
        f"learning-curves-{run.name}",
        f"Learning curves by pass, {run.name}",
        "A running mean, with the logged values behind it. Shock: how much worse the second pass is than the first over the same "
        "positions, when it is first used. Crossover: where its running mean falls below the first's in training. Then the norm of the "
        "gradient, and the learning rates.",
        lambda paths: plot_curves(curves, paths, milestones, steps),
        curves_charts(curves, milestones, steps),
    )
