"""An evaluation as Markdown: what was asked, the tables, paired traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fullband.evaluate.report.tables import MODES, ReportTable, tables_of

TRACE_CHARACTERS = 1200


def markdown(results: Mapping[str, Any], pictures: Mapping[str, str] | None = None) -> str:
    """`pictures`: file names by what they show."""
    parts = [f"# {headline(results)}", about(results)]
    parts += [f"![{shown}]({name})" for shown, name in (pictures or {}).items()]
    parts += [markdown_table(table) for table in tables_of(results)]
    parts += traces(results)
    parts.append("## Hashes and versions\n\n" + "\n".join(f"- {line}" for line in provenance(results)))
    return "\n\n".join(parts) + "\n"


def headline(results: Mapping[str, Any]) -> str:
    what = results["plan"]["suite"] or ", ".join([*results["tasks"], *results["generative"]])
    return f"{'Smoke test: ' if results['smoke_test'] else ''}{results['model']['name']} on {what}"


def about(results: Mapping[str, Any]) -> str:
    plan, model = results["plan"], results["model"]
    sentences = [f"Model: `{model['name']}`, {model['parameters']:,} parameters, {model['dtype']}."]
    if results["baseline"]:
        sentences.append(f"Baseline: `{results['baseline']['name']}`, without feedback.")
    if plan.get("limit"):  # older evaluations may not say it
        sentences.append(f"Only the first {plan['limit']} documents of each task (`--limit`).")
    if results["smoke_test"]:
        sentences.append("Fewer than 200 problems in a task: this shows that the evaluation works, not which is better.")
    if results["generative"]:
        sentences.append(
            f"Prompts: {'a task’s own examples' if plan['prompts'] == 'base' else 'one turn of chat, no examples'}; seed {plan['seed']}."
        )
    sentences.append(f"Took {results['seconds'] / 60:.1f} minutes on {results['machine']['cores']} cores ({model['device']}).")
    return " ".join(sentences)


def markdown_table(table: ReportTable) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---"] * table.words + ["---:"] * (len(table.columns) - table.words)
    return "\n".join(
        [f"## {table.title}\n", line(table.columns), line(rule), *map(line, table.rows), *(f"\n{note}" for note in table.notes)]
    )


def traces(results: Mapping[str, Any]) -> list[str]:
    """Fig. 8: answers of the modes to the same problem."""
    parts = []
    for found in results["generative"].values():
        for trace in found["traces"]:
            parts.append(f"## {found['label']}, problem {trace['problem']}: the modes side by side")
            parts += [fenced(trace["question"])] if trace.get("question") else []  # older evaluations did not keep it
            for mode, answer in trace["answers"].items():
                parts.append(f"{MODES[mode]}: {ending(answer)}\n\n{fenced(answer_text(answer))}")
    return parts


def fenced(text: str) -> str:
    shown = text if len(text) <= TRACE_CHARACTERS else f"{text[:TRACE_CHARACTERS]}\n[…]"
    fence = "`" * max(4, 1 + max((len(run) for run in text.split() if set(run) == {"`"}), default=0))
    return f"{fence}text\n{shown}\n{fence}"


def ending(answer: Mapping[str, Any]) -> str:
    cut = ", cut at the limit" if answer["finish"] == "length" else ""
    return f"{answer['tokens']} tokens{cut}, {answer['verdict']}"


def answer_text(answer: Mapping[str, Any]) -> str:
    """Without empty lines around it."""
    return str(answer["text"]).rstrip().strip("\n") or "(empty)"


def provenance(results: Mapping[str, Any]) -> list[str]:
    """Lines: weights, data, prompts, versions."""
    lines = [f"weights of {model['name']}: sha256 {model['weights']}" for model in (results["model"], results["baseline"]) if model]
    for name, found in (results["tasks"] | results["generative"]).items():
        lines.append(f"{name}: data {found['data_hash']}, prompts {' '.join(found['prompt_hash'])}")
    lines.append(", ".join(f"{package} {number}" for package, number in results["versions"].items()))
    return lines
