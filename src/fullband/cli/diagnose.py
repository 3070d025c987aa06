"""`fullband diagnose`: does the feedback of a model settle, and does it work? A verdict in words, tables, figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullband.cli.models import AsJson, Device, Dtype, ModelFolder, open_model

if TYPE_CHECKING:
    from fullband.data.batch import Batch
    from fullband.data.tokenizer import Tokenizer
    from fullband.diagnose import Diagnosis

EXAMPLES = """Examples:

\b
  fullband diagnose runs/tiny-text                                the run's own held-out text
  fullband diagnose runs/quickstart/fullband --task S3 --length 64
  fullband diagnose runs/tiny-text --passes 1000 --rows 2 --output results/diagnose/tiny-text
  fullband diagnose MODEL --text notes.txt --rollout 0 --json
"""

DOCUMENTS = 256  # that rows are cut from, at most


def diagnose(
    model: ModelFolder,
    text: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Text to evaluate: txt, jsonl or parquet files, or a glob; may be repeated.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Evaluate a built-in task: group-word, S3, S4, S5, A4, A5, Z7 …, modular or modular-11."),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="Use the held-out data of this recipe; default: the run's own.")
    ] = None,
    passes: Annotated[int, typer.Option(min=3, help="Maximum number of passes; 1000 for Fig. 10.")] = 32,
    rows: Annotated[int, typer.Option(min=1, help="Number of sequences to evaluate.")] = 8,
    length: Annotated[
        int | None,
        typer.Option(
            min=4, help="Length of a sequence in tokens; default: 256 or twice the passes, whichever is more, if context and data allow."
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Relative change of a state below which it counts as settled.")] = 1e-2,
    rollout: Annotated[
        int, typer.Option(min=0, help="Length of the two rollouts (greedy and sampled) in tokens, at least 2; 0 = none.")
    ] = 2048,
    temperature: Annotated[float, typer.Option(help="Temperature of the sampled rollout.")] = 1.0,
    sigma: Annotated[float, typer.Option(help="Size of the perturbation, relative to the state's norm.")] = 0.02,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed for sampling, noise and the task's examples.")] = 0,
    folder: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Write diagnosis.json, report.html and figures (PNG, SVG) to this folder."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Measure whether the feedback settles, and why.

    Evaluates sequences in repeated passes and exactly, generates, perturbs states, and measures what each state can reach. The verdict
    is one of: contracting, wavefront-limited, oscillating, diverging, not yet trained, not measurable at this length.
    """
    from fullband.cli.console import messages, output, print_json
    from fullband.cli.progress import counted_progress
    from fullband.diagnose import DiagnosisSettings
    from fullband.diagnose import diagnose as measure
    from fullband.files import check_place

    if sum(map(bool, (text, task, recipe))) > 1:
        raise ValueError("--text, --task and --recipe each choose the data; give only one of them")
    if not all(0 < number < math.inf for number in (tolerance, temperature, sigma)):
        raise ValueError("--tolerance, --temperature and --sigma are numbers above 0")
    if folder is not None:
        check_place(folder)
    network, tokenizer, found = open_model(model, device, dtype)
    data, batch = rows_to_read(found, tokenizer, network.trunk.context, text, task, recipe, rows, passes, length, seed)
    settings = DiagnosisSettings(passes, tolerance, rollout, temperature, sigma, seed)
    with counted_progress(messages()) as watcher:
        diagnosis = measure(network, batch, settings, watcher)
    described = {"model": str(model), "data": data} | diagnosis.to_json()
    if folder is not None:
        write_report(folder, described)
    if as_json:
        print_json(described)
    else:
        print_diagnosis(output(), described, diagnosis, folder)


def rows_to_read(
    folder: Path,
    tokenizer: Tokenizer,
    context: int,
    text: list[str] | None,
    task: str | None,
    recipe: Path | None,
    rows: int,
    passes: int,
    length: int | None,
    seed: int,
) -> tuple[str, Batch]:
    """(what they are, the rows). Raises ValueError for data that is not the model's."""
    from fullband.config import TaskSource, load_recipe
    from fullband.data.documents import recipe_documents, text_documents
    from fullband.diagnose import rows_of_documents, rows_of_task

    if text:
        data, documents = text_documents(text, tokenizer, DOCUMENTS)
        return data, rows_of_documents(documents, rows, passes, context, length)
    own = recipe or folder.parent.parent / "recipe.yaml"
    described = load_recipe(own) if own.is_file() else None
    source = task_source(task) if task else described.data.source if described else None
    if isinstance(source, TaskSource):
        check_task(source, tokenizer)
        same = described is not None and described.data.source == source
        trained = described.data.length if described is not None and same else None
        data = f"held-out examples of {task_name(source)}"
        return data, rows_of_task(source, seed, rows, passes, context, length, trained)
    data, documents = recipe_documents(recipe, folder, tokenizer, DOCUMENTS)
    return data, rows_of_documents(documents, rows, passes, context, length)


def task_source(name: str) -> Any:
    """group-word (S3), modular (7), a group's name, or modular-N. Raises ValueError."""
    from fullband.config import TaskSource, parse

    if name == "group-word":
        return TaskSource()
    kind, _, modulus = name.partition("-")
    if kind == "modular":
        return parse(TaskSource, {"task": "modular"} | ({"modulus": modulus} if modulus else {}), f"--task {name}")
    return parse(TaskSource, {"group": name}, f"--task {name}")


def task_name(source: Any) -> str:
    return f"running products in {source.group}" if source.task == "group-word" else f"arithmetic modulo {source.modulus}"


def check_task(source: Any, tokenizer: Tokenizer) -> None:
    from fullband.data.tasks import build_task
    from fullband.data.tokenizers import TaskTokenizer

    task = build_task(source)
    wanted = TaskTokenizer(task.name, task.names).name
    if tokenizer.name != wanted:
        raise ValueError(f"the model's tokenizer is {tokenizer.name}, the task needs {wanted}: this model was not trained on the task")


def write_report(folder: Path, described: dict[str, Any]) -> None:
    """diagnosis.json, report.html, and the figures as PNG and SVG, all of the same numbers: what is not finite is null."""
    from fullband.amounts import without_infinities
    from fullband.files import write_bytes, write_json
    from fullband.plots.diagnosis_page import page, plot_arrival, plot_response, plot_rollouts, plot_settling
    from fullband.plots.reachability import plot_reachability

    described = without_infinities(described)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "diagnosis.json", described)
    write_bytes(folder / "report.html", page(described).encode())
    figures = {"settling": plot_settling, "arrival": plot_arrival}
    if described["reach"]:
        figures["reachability"] = plot_reachability
    if described["rollouts"]:
        figures["rollouts"] = plot_rollouts
    if described["perturbation"]:
        figures["response"] = plot_response
    for name, plot in figures.items():
        plot(described, [folder / f"{name}.png", folder / f"{name}.svg"])


def print_diagnosis(console: Any, described: dict[str, Any], diagnosis: Diagnosis, folder: Path | None) -> None:
    from fullband.cli.tables import print_table, table
    from fullband.plots.diagnosis_page import HEADS, LISTED, cells_of, needed_text, rollout_text
    from fullband.plots.numbers import number
    from fullband.plots.reachability import reach_text

    trace = diagnosis.trace
    console.print(f"Verdict: {diagnosis.verdict.headline}", style="bold")
    for sentence in diagnosis.verdict.why:
        console.print(f"  {sentence}")
    console.print()
    made = table(list(HEADS))
    for record in described["trace"]["records"]:
        if record["k"] in LISTED or record["k"] == trace.records[-1].k:
            made.add_row(*cells_of(record))
    print_table(
        console,
        f"Repeated passes over {trace.rows} sequences of {trace.length} positions ({described['data']})",
        made,
        f"past: positions {trace.horizon} and later, which the wavefront has not reached (while k <= {trace.horizon}). "
        f"front: the one position of each sequence that the pass makes final. Loss of exact evaluation: {number(trace.loss_exact)} nats,  "
        f"{number(trace.loss_exact_past)} past. Change ratio per pass: median {number(trace.ratio_median)}, 99th percentile "
        f"{number(trace.ratio_p99)}, {number(trace.late_ratio)} at the end. Passes needed until 99% of the states move less than "
        f"{needed_text(described['trace'])}. Arrival: {number(trace.arrival.passes_per_position)} passes per position.",
    )
    for rollout in described["rollouts"]:
        console.print(rollout_text(rollout))
    if diagnosis.perturbation is not None:
        found = diagnosis.perturbation
        over = "" if found.over_passes is None else f", x {number(found.over_passes.growth)} per pass past the wavefront"
        console.print(
            f"A perturbation of {found.sigma:g} of a state's norm grows x {number(found.along_positions.growth)} per position{over}."
        )
    if diagnosis.reach:
        console.print(f"Reachability by gradients: {reach_text(described)}.")
    else:
        console.print(f"Reachability was not measured: {diagnosis.reach_missing}.")
    if folder is not None:
        console.print(f"Figures and report: {folder}/report.html")
