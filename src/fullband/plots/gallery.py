"""`fullband plot`: the paper's figures from run, diagnosis and probe folders. What each shows is said here once; how, in its own module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from fullband.files import write_bytes
from fullband.plots.chart import MOST_RUNS, Axis, Chart, Line, Mark
from fullband.plots.curves import curves_html, plot_curves
from fullband.plots.diagnosis_page import change_chart, loss_chart, plot_settling
from fullband.plots.numbers import finite
from fullband.plots.page import fill
from fullband.plots.passes import has_passes, passes_chart, plot_passes
from fullband.plots.probe import CHANCE, KEYS, LABELS, SUFFIXES, TITLES, parts_of
from fullband.plots.reachability import plot_reachability, reach_html
from fullband.plots.runs import RunRecord
from fullband.plots.sources import Sources

TEMPLATE = Path(__file__).with_name("gallery.html")
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
    runs = [run for run in sources.runs if has_passes(run)]
    found += [_passes_figure(runs[first : first + MOST_RUNS], first, len(runs)) for first in range(0, len(runs), MOST_RUNS)]
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
    return fill(TEMPLATE, sections=sections)


def _diagnosis_figures(name: str, diagnosis: Mapping[str, Any]) -> list[Figure]:
    trace = diagnosis["trace"]
    number = 10 if diagnosis["settings"]["passes"] >= LONG else 3
    settling = Figure(
        f"figure-{number}-{name}",
        f"Fig. {number}: loss and state change by pass, {name}",
        f"Verdict: {diagnosis['verdict']}. {trace['rows']} sequences of {trace['length']} positions, {trace['records'][-1]['k']} passes.",
        lambda paths: plot_settling(diagnosis, paths),
        loss_chart(trace).html() + change_chart(trace).html(),
    )
    reach = Figure(
        f"figure-1-{name}",
        f"Fig. 1, measured: what moves a state, {name}",
        f"Model: {diagnosis['model']}.",
        lambda paths: plot_reachability(diagnosis, paths),
        reach_html(diagnosis) if diagnosis["reach"] else "",
    )
    return [settling, reach] if diagnosis["reach"] else [settling]


def _passes_figure(runs: Sequence[RunRecord], first: int, all_runs: int) -> Figure:
    """Of as many runs as a picture can tell apart, from run `first` on."""
    part = "" if all_runs <= MOST_RUNS else f", runs {first + 1} to {first + len(runs)} of {all_runs}"
    return Figure(
        "figure-4-left" + (f"-{first // MOST_RUNS + 1}" if first else ""),
        f"Fig. 4, left: loss by feedback passes{part}",
        "Held-out loss at the last evaluation of each run; 0 is without feedback.",
        lambda paths: plot_passes(runs, paths),
        passes_chart(runs).html(),
    )


def _probe_figures(name: str, probe: Mapping[str, Any]) -> list[Figure]:
    caption = "Held-out accuracy of a linear probe at the last token; chance is 0.5. What can be decoded need not be used."
    figures = []
    for part, title, settings, plot in parts_of(probe):
        heads = [TITLES.get(setting["task"], setting["setting"]) for setting in settings]
        charts = [_depth_chart(setting).html() for setting in settings]
        html = "".join(f"<h3>{escape(head)}</h3>{chart}" for head, chart in zip(heads, charts, strict=True))
        figures.append(Figure(f"figure-{part}-{name}", f"Fig. {part}: {title}, {name}", caption, partial(plot, settings), html))
    return figures


def _depth_chart(setting: Mapping[str, Any]) -> Chart:
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
    return Chart(setting["setting"], lines, x, y, [Mark("chance", y=CHANCE)])


def _curves_figure(run: RunRecord) -> Figure:
    model = "standard" if run.switch_on_step is None else "fullband"
    curves, steps = {model: run.curves}, {model: run.steps}
    milestones = {"switch_on_step": run.switch_on_step} | {key: run.last[key] for key in ("switch_on_shock", "crossover_step")}
    return Figure(
        f"learning-curves-{run.name}",
        f"Learning curves by pass, {run.name}",
        "A running mean, with the logged values under it. Shock: how much worse the second pass is than the first over the same "
        "positions, when it is first used. Crossover: where its running mean falls below the first's in training. Then the norm of the "
        "gradient, and the learning rates.",
        lambda paths: plot_curves(curves, paths, milestones, steps),
        curves_html(curves, milestones, steps),
    )
