"""An evaluation's results.json as pictures, accuracy by feedback passes (Fig. 4), free-form scores by mode (Fig. 5), length (Fig. 6); and
as one page that opens offline: these, its tables, paired traces (Fig. 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from fullband.evaluate.report.markdown import about, answer_text, ending, headline, provenance
from fullband.evaluate.report.tables import MODES, ReportTable, tables_of
from fullband.plots.page import fill
from fullband.plots.style import LIGHT, draw_chance, figure

TEMPLATE = Path(__file__).with_name("evaluation_page.html")
KEYS = {"standard": "standard", "soft": "fused-2", "fused": "fused-16"}

CODE = ("humaneval", "mbpp")  # benchmarks whose answers are programs
COLOURS = {mode: LIGHT[key] for mode, key in KEYS.items()} | {"baseline": LIGHT["exact"]}
LABELS = MODES | {"baseline": "baseline"}
MARKERS = {"standard": ("o", 12), "soft": ("s", 7), "fused": ("D", 4), "baseline": ("x", 9)}  # points in one place are all seen


def page(results: Mapping[str, Any], folder: Path, pictures: Mapping[str, str]) -> str:
    """`pictures` are files of `folder` by what they show, as `plot_evaluation` made them there."""
    return fill(
        TEMPLATE,
        headline=escape(headline(results)),
        about=escape(about(results).replace("`", "")),
        pictures="\n".join(_pictures(folder, pictures)),
        tables="\n".join(_table(table) for table in tables_of(results)),
        traces="\n".join(_traces(results)),
        provenance="\n".join(f"<li>{escape(line)}</li>" for line in provenance(results)),
    )


def _pictures(folder: Path, pictures: Mapping[str, str]) -> Iterator[str]:
    for shown, name in pictures.items():
        svg = (folder / name).read_text(encoding="utf-8")
        yield f'<figure role="img" aria-label="{escape(shown)}">{svg[svg.index("<svg") :]}</figure>'


def _table(table: ReportTable) -> str:
    rows = "\n".join(_line("td", row, table.words) for row in table.rows)
    body = f"<thead>{_line('th', table.columns, table.words)}</thead>\n<tbody>\n{rows}\n</tbody>"
    notes = "\n".join(f'<p class="small">{escape(note)}</p>' for note in table.notes)
    return f'<h2>{escape(table.title)}</h2>\n<div class="scroll"><table>{body}</table></div>\n{notes}'


def _line(tag: str, cells: list[str], words: int) -> str:
    """A line of a table, whose first columns are words."""
    classes = [' class="word"' if place < words else "" for place in range(len(cells))]
    return "<tr>" + "".join(f"<{tag}{own}>{escape(cell)}</{tag}>" for own, cell in zip(classes, cells, strict=True)) + "</tr>"


def _traces(results: Mapping[str, Any]) -> list[str]:
    parts = []
    for name, found in results["generative"].items():
        code = " code" if name.startswith(CODE) else ""
        for trace in found["traces"]:
            parts.append(f"<h2>{escape(found['label'])}, problem {trace['problem']}: the modes side by side</h2>")
            parts.append(f'<p class="question{code}">{escape(trace.get("question", ""))}</p>\n<div class="traces">')
            for mode, answer in trace["answers"].items():
                parts.append(
                    f'<section class="trace {KEYS[mode]}"><h3>{MODES[mode]}</h3><p class="small">{escape(ending(answer))}</p>'
                    f'<p class="text{code}">{escape(answer_text(answer))}</p></section>'
                )
            parts.append("</div>")
    return parts


def plot_evaluation(results: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Draw what the results hold into `folder`, as SVG. Returns file names by what they show, in the order of the paper."""
    modes = [own for found in results["generative"].values() for own in found["modes"].values()]
    figures: list[tuple[bool, str, str, Callable[[Mapping[str, Any], Path], None]]] = [
        (len((results["mean"] or {}).get("readings", ())) > 1, "accuracy by feedback passes", "figure-4.svg", plot_passes),
        (bool(modes), "free-form scores by mode", "figure-5.svg", plot_modes),
        (any(own["lengths"]["median"] is not None for own in modes), "length of answers by mode", "figure-6.svg", plot_lengths),
    ]
    held = [figure[1:] for figure in figures if figure[0]]
    for _, name, plot in held:
        plot(results, folder / name)
    return {shown: name for shown, name, _ in held}


def plot_passes(results: Mapping[str, Any], path: Path) -> None:
    """Fig. 4 right: the mean over tasks, and thinly the tasks themselves; the mean of what guessing gives, where that is known."""
    mean = results["mean"]
    names = [name for name in mean["readings"] if name != "soft"]  # no number of feedback passes: it has no place on the axis
    places = range(len(names))
    with figure([path], width=6.4) as (_, axes):
        for number, task in enumerate(results["tasks"].values()):
            label = "each task" if number == 0 else None
            axes.plot(places, [_percent(task["readings"][name]) for name in names], color="#c9ced6", linewidth=1, zorder=1, label=label)
        values = [mean["readings"][name] for name in names]
        axes.errorbar(
            places, [_percent(one) for one in values], yerr=[_error(one) for one in values], color=LIGHT["fused-8"], marker="o", capsize=3,
            zorder=3, label="mean of tasks",
        )  # fmt: skip
        if "baseline" in mean:
            _level(axes, mean["baseline"])
        chance = mean.get("chance")  # older results do not say it
        draw_chance(axes, None if chance is None else 100 * chance)
        axes.set_xticks(list(places), names)
        axes.set(xlabel="feedback passes", ylabel="accuracy, percent")
        axes.set_title(_title(results, f"{len(results['tasks'])} tasks by feedback passes"))
        axes.figure.legend(loc="outside right upper", fontsize=9)


def plot_modes(results: Mapping[str, Any], path: Path) -> None:
    """Fig. 5: one panel for each benchmark, a bar for each mode with its score in figures; the baseline as a level."""
    with _panels(results, path, width=2.6) as panels:
        for benchmark, axes in panels:
            for place, (mode, own) in enumerate(benchmark["modes"].items()):
                value, error = _percent(own["score"]), _error(own["score"])
                axes.bar(place, value, yerr=error or None, width=0.66, color=COLOURS[mode], capsize=3)
                axes.annotate(f"{value:.1f}", (place, value + error), textcoords="offset points", xytext=(0, 3), ha="center", fontsize=9)
            if "baseline" in benchmark:
                _level(axes, benchmark["baseline"]["score"])
            axes.set_xticks(range(len(benchmark["modes"])), [LABELS[mode] for mode in benchmark["modes"]])
            axes.set_ylim(0, max(5.0, 1.08 * axes.get_ylim()[1]))


def plot_lengths(results: Mapping[str, Any], path: Path) -> None:
    """Fig. 6: median tokens against the score, a point for each mode and the baseline. What never ended an answer has no point."""
    with _panels(results, path, width=3.0) as panels:
        for benchmark, axes in panels:
            shown = benchmark["modes"] | ({"baseline": benchmark["baseline"]} if "baseline" in benchmark else {})
            for name, own in shown.items():
                if own["lengths"]["median"] is not None:
                    marker, size = MARKERS[name]
                    axes.errorbar(
                        own["lengths"]["median"], _percent(own["score"]), yerr=_error(own["score"]) or None, color=COLOURS[name],
                        marker=marker, markersize=size, linestyle="", elinewidth=1.2, capsize=3, label=LABELS[name], clip_on=False,
                    )  # fmt: skip
            axes.margins(0.25)
            axes.locator_params(axis="x", nbins=5, integer=True)
            if not axes.lines:
                axes.set_xticks([])
                axes.annotate("no answer ended", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=9)
            axes.set_ylim(max(0.0, axes.get_ylim()[0]), max(5.0, axes.get_ylim()[1]))
            axes.set_xlabel("median tokens of ended answers")


@contextmanager
def _panels(results: Mapping[str, Any], path: Path, width: float) -> Iterator[list[tuple[Mapping[str, Any], Any]]]:
    """(benchmark, axes) in a row, `width` inches each; when they are drawn, one legend for all."""
    found = list(results["generative"].values())
    with figure([path], width=width * len(found) + 1.6, height=3.6, rows=1, columns=len(found)) as (drawing, axes):
        panels = list(zip(found, list(axes.flat) if len(found) > 1 else [axes], strict=True))
        yield panels
        labelled: dict[str, Any] = {}
        for benchmark, own in panels:
            own.set_title(_title(results, benchmark["label"]))
            own.set_ylabel(f"Pass@{benchmark['k']}, percent")
            handles, labels = own.get_legend_handles_labels()
            labelled |= dict(zip(labels, handles, strict=True))
        if labelled:
            drawing.legend(labelled.values(), labelled.keys(), loc="outside right upper", fontsize=9)


def _level(axes: Any, found: Mapping[str, Any]) -> None:
    axes.axhline(_percent(found), color=COLOURS["baseline"], linewidth=1.4, linestyle="--", label=LABELS["baseline"])


def _title(results: Mapping[str, Any], title: str) -> str:
    return f"Smoke test: {title}" if results["smoke_test"] else title


def _percent(found: Mapping[str, Any]) -> float:
    return 100 * float(found["value"])


def _error(found: Mapping[str, Any]) -> float:
    error = found["error"]
    return 0.0 if error is None or error != error else 100 * float(error)
