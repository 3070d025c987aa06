"""`fullband evaluate-loss`: loss and perplexity by feedback passes, on held-out documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullband.cli.models import AsJson, Device, Dtype, ModelFolder, open_model

if TYPE_CHECKING:
    from fullband.data.batch import Document
    from fullband.evaluate import LossReport

EXAMPLES = """Examples:

\b
  fullband evaluate-loss runs/tiny-text                                    the run's own held-out documents
  fullband evaluate-loss runs/tiny-text --feedback-passes 0,1,2,4,exact --documents 8
  fullband evaluate-loss runs/tiny-text --text notes.txt --text 'logs/*.jsonl' --json
"""

TIMED_STEPS = 4  # from which the time of all is estimated


def evaluate_loss(
    model: ModelFolder,
    text: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Text to evaluate: txt, jsonl or parquet files, or a glob; may be repeated.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(metavar="RECIPE", help="Evaluate the held-out documents of this recipe.")] = None,
    feedback_passes: Annotated[
        str,
        typer.Option(
            metavar="N,exact,…",
            help="Numbers of feedback passes: 0 = without feedback, exact = one position at a time, converged = until states settle.",
        ),
    ] = "0,1,2",
    documents: Annotated[int, typer.Option(min=1, help="Maximum number of documents.")] = 32,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a batch; lower it if memory is short.")] = 8192,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Measure the loss by feedback passes.

    Loss and perplexity with standard errors over documents; by default on what the run itself held out.
    """
    from fullband.cli.console import messages, output, print_json
    from fullband.cli.progress import forward_progress
    from fullband.data.documents import recipe_documents, text_documents
    from fullband.evaluate import loss_by_passes
    from fullband.feedback.by_passes import positions_to_run
    from fullband.feedback_config import parse_feedback_passes

    if text and recipe:
        raise ValueError("--text and --recipe each choose the data; give only one of them")
    passes = [parse_feedback_passes(part, "--feedback-passes") for part in feedback_passes.split(",")]
    network, tokenizer, folder = open_model(model, device, dtype)
    source, chosen = text_documents(text, tokenizer, documents) if text else recipe_documents(recipe, folder, tokenizer, documents)
    length = sum(len(document) for document in chosen)
    positions = positions_to_run(length, [0, *passes])
    exact = "exact" in passes
    if exact:
        say_what_exact_takes(network, chosen, batch_tokens)
    with forward_progress(messages(), network, positions, f"evaluating {len(chosen)} documents", single=length * exact):
        report = loss_by_passes(network, chosen, passes, batch_tokens)
    if as_json:
        print_json({"model": str(folder), "data": source} | report.to_json())
    else:
        print_report(output(), report, source)


def say_what_exact_takes(network: Any, documents: list[Document], batch_tokens: int) -> None:
    """Time a few steps of the largest batch, and say what all of them will take, if that is long."""
    import time

    import torch

    from fullband.amounts import duration
    from fullband.cli.console import messages
    from fullband.cli.progress import PATIENCE
    from fullband.evaluate.loss import batch_shapes
    from fullband.feedback.by_passes import top_states

    shapes = batch_shapes(network, documents, batch_tokens)
    steps = sum(length for _, length in shapes)
    if steps <= TIMED_STEPS:
        return
    tokens = torch.zeros(shapes[0][0], TIMED_STEPS, dtype=torch.long, device=network.trunk.device)
    with torch.no_grad():
        top_states(network, tokens[:, :1], "exact")  # the first call of all costs more
        begun = time.perf_counter()
        top_states(network, tokens, "exact")
    seconds = (time.perf_counter() - begun) / TIMED_STEPS * steps
    if seconds >= PATIENCE:
        fewer = "" if len(documents) == 1 else "; fewer with --documents"
        messages().print(f"exact evaluation: {steps:,} steps, one position at a time, about {duration(seconds)}{fewer}", soft_wrap=True)


def print_report(console: Any, report: LossReport, source: str) -> None:
    from fullband.cli.tables import print_table, table

    made = table(["feedback passes", "loss (nats)", "± error", "perplexity", "± error", "difference to 0", "± error"])
    for row in report.rows:
        plain = row.feedback_passes == 0
        made.add_row(
            str(row.feedback_passes),
            f"{row.loss:.4f}",
            error(row.loss_stderr, 4),
            f"{row.perplexity:.3f}",
            error(row.perplexity_stderr, 3),
            "" if plain else f"{row.difference:+.4f}",
            "" if plain else error(row.difference_stderr, 4),
        )
    print_table(
        console,
        f"Loss by feedback passes: {report.documents} documents, {report.tokens:,} tokens ({source})",
        made,
        "Standard errors over documents; differences are paired by document.",
    )


def error(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
