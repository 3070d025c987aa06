"""`fullband mismatch`: log-probabilities as a server sampled, against those that the model gives in parallel passes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullband.cli.models import AsJson, Device, Dtype, ModelFolder, open_model

if TYPE_CHECKING:
    from fullband.data.tokenizer import Tokenizer
    from fullband.decode.answers import SampledAnswer
    from fullband.evaluate.mismatch import Mismatch

EXAMPLES = """Examples:

\b
  fullband mismatch runs/tiny-text --server http://127.0.0.1:8000 --prompts prompts.txt
  fullband mismatch smollm2-fullband --server http://127.0.0.1:8000 --prompts prompts.txt --mode fused --answer-passes 0,1,2,4,exact
  fullband mismatch runs/tiny-text --answers answers.jsonl --json

\b
For reinforcement learning: a trainer computes the log-probabilities of sampled answers in a few parallel passes, and clips their ratios to
those of sampling. k feedback passes give the first k + 1 tokens of an answer exactly.
Answers: a reply of /v1/completions (ours or vLLM's) on each line, asked for with "logprobs": 0 and "return_token_ids": true.
"""


def mismatch(
    model: ModelFolder,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Server to sample from, at temperature 1; it must serve this model.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="With --server: file of prompts, txt or jsonl; - for stdin.")] = None,
    answers: Annotated[Path | None, typer.Option(metavar="FILE", help="Answers that were sampled already, jsonl.")] = None,
    mode: Annotated[str, typer.Option(help="Mode of sampling: standard, soft or fused.")] = "soft",
    feedback_passes: Annotated[
        str | None, typer.Option(metavar="N", help="Feedback passes over the prompt in fused mode: 1, 2, …, exact or converged.")
    ] = None,
    answer_passes: Annotated[
        str, typer.Option(metavar="N,exact,…", help="Feedback passes over the answer; exact = one position at a time, as it was sampled.")
    ] = "0,1,2,4,exact",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="With --server: maximum length of an answer, in tokens.")] = 64,
    n: Annotated[int, typer.Option("--n", min=1, help="With --server: number of answers to each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="With --server: random seed for sampling.")] = 0,
    key: Annotated[str | None, typer.Option(envvar="FULLBAND_API_KEY", help="The server's key; better given as FULLBAND_API_KEY.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of answers evaluated together.")] = 16,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Measure how far recomputed log-probabilities are from those of sampling.

    Mean and largest |Δ log p|, and the share of ratios outside [0.8, 1.2], by feedback passes over the answers.
    """
    from fullband.cli.console import output, print_json
    from fullband.decode import resolve_mode
    from fullband.evaluate.mismatch import mismatch_by_passes
    from fullband.feedback_config import parse_feedback_passes

    if (answers is None) == (server is None) or (server is None) != (prompts is None):
        raise ValueError("give --server URL with --prompts FILE, or --answers FILE")
    chosen = None if feedback_passes is None else parse_feedback_passes(feedback_passes, "--feedback-passes")
    passes = list(dict.fromkeys(parse_feedback_passes(part, "--answer-passes") for part in answer_passes.split(",")))
    resolve_mode(mode, chosen)
    sampled = None if answers is None else read_answers(answers)
    network, tokenizer, folder = open_model(model, device, dtype)
    if sampled is None:
        from fullband.serve.client import Client

        ids = prompt_ids(str(prompts), tokenizer, network, max_new_tokens)
        sampled = Client(str(server), key or None).sample(ids, max_new_tokens, mode, chosen, n, seed)
    rows = mismatch_by_passes(network, sampled, mode, chosen, passes, batch_size)
    if as_json:
        source = {"server": server, "prompts": prompts, "n": n, "seed": seed} if answers is None else {"file": str(answers)}
        print_json({"model": str(folder), "mode": mode, "answers": len(sampled), **source, "rows": [asdict(row) for row in rows]})
    else:
        print_report(output(), rows, len(sampled), mode)


def prompt_ids(source: str, tokenizer: Tokenizer, network: Any, most: int) -> list[list[int]]:
    """The tokens of each prompt of a file."""
    from fullband.cli.console import messages
    from fullband.cli.prompt_files import read_prompts, tokenize_prompts
    from fullband.decode import GenerateOptions

    found = read_prompts(source, lambda note: messages().print(note, soft_wrap=True))
    return tokenize_prompts(found, tokenizer, network.trunk, GenerateOptions(max_new_tokens=most))


def read_answers(path: Path) -> list[SampledAnswer]:
    """The answers of a file. Raises ValueError naming the line."""
    from fullband.serve.client import sampled_answers

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    found: list[SampledAnswer] = []
    for number, line in enumerate(lines, start=1):
        try:
            found += sampled_answers(json.loads(line)) if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not valid JSON ({error.msg}, column {error.colno})") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{path}: has no answers")
    return found


def print_report(console: Any, rows: list[Mismatch], answers: int, mode: str) -> None:
    from fullband.cli.tables import print_table, table
    from fullband.evaluate.mismatch import RATIOS

    made = table(["feedback passes", "mean |Δ log p|", "largest", f"ratios outside [{RATIOS[0]}, {RATIOS[1]}]"])
    for row in rows:
        made.add_row(str(row.answer_passes), f"{row.mean:.2g}", f"{row.largest:.2g}", f"{100 * row.outside:.2f}%")
    title = f"Recomputed against sampled log-probabilities (nats): {answers} answers, {rows[0].tokens:,} tokens, mode {mode}"
    print_table(console, title, made, "Feedback passes over the answer. Ratio: recomputed probability over that of sampling.")
