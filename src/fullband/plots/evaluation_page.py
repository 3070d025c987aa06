"""An evaluation as one page that opens offline: pictures, tables, paired traces (Fig. 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from fullband.evaluate.report.markdown import about, answer_text, ending, headline, provenance
from fullband.evaluate.report.tables import MODES, ReportTable, tables_of
from fullband.plots.page import fill

TEMPLATE = Path(__file__).with_name("evaluation_page.html")
KEYS = {"standard": "standard", "soft": "fused-2", "fused": "fused-16"}

CODE = ("humaneval", "mbpp")  # benchmarks whose answers are programs


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
