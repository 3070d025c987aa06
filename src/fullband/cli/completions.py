"""What `fullband generate` and `fullband chat` were asked, and what generation took, as JSON and in a line."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullband.decode.options import GenerateOptions
from fullband.decode.speculate import SpeculationReport

if TYPE_CHECKING:
    from fullband.data.tokenizer import Tokenizer
    from fullband.feedback.converged import ConvergedReport
    from fullband.loading import LoadedModel

DEFAULT_NEW_TOKENS = 256
CHUNK = 512  # positions of a prompt run at a time: the result does not depend on it, memory and the progress bar do
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "n")
LIMITS = ("max_new_tokens", "min_new_tokens", "max_length", "overflow")


@dataclass(frozen=True)
class Prompt:
    """`id` is the file's own, or the number of the line; `where` is "file:line", and empty for a prompt of the command line."""

    text: str
    id: int | str = 1
    where: str = ""


@dataclass(frozen=True)
class GenerateRequest:
    """What `fullband generate` was asked: a model (and the folder that held it), prompts with their tokens, and options; `settings` says in
    JSON all that decides what text is made, but for model, prompt and mode."""

    model: LoadedModel
    tokenizer: Tokenizer
    folder: Path
    prompts: list[Prompt]
    tokens: list[list[int]]
    options: GenerateOptions
    settings: dict[str, Any]


def limited(options: GenerateOptions, context: int) -> GenerateOptions:
    """Where no number of tokens was asked for: DEFAULT_NEW_TOKENS, or as many as the context has room for."""
    if options.max_new_tokens is not None or options.max_length is not None:
        return options
    return replace(options, max_new_tokens=DEFAULT_NEW_TOKENS, max_length=None if options.overflow == "slide" else context)


def settings_json(options: GenerateOptions, dtype: str, quantize: str | None = None) -> dict[str, Any]:
    """All that decides what text is made, but for model, prompt and mode."""
    return {name: getattr(options, name) for name in (*SAMPLING, *LIMITS)} | {
        "stop": list(options.stop_strings),
        "speculate": None if options.speculation is None else asdict(options.speculation),
        "dtype": dtype,
        "quantize": quantize,
    }


def add_reports(total: SpeculationReport, more: SpeculationReport) -> SpeculationReport:
    return SpeculationReport(*(getattr(total, field.name) + getattr(more, field.name) for field in fields(SpeculationReport)))


def speculation_json(report: SpeculationReport) -> dict[str, Any]:
    return asdict(report) | {"acceptance_length": report.acceptance_length}


def speculation_line(report: SpeculationReport) -> str:
    """What speculation spared, in one line."""
    if not report.checks:
        return "self-speculation: no repetition in the text, so nothing was drafted"
    return (
        f"self-speculation: {report.acceptance_length:.2f} drafted tokens accepted per check ({report.kept} of {report.drafted} in "
        f"{report.checks} checks); {report.passes} passes where plain decoding takes {report.checks + report.steps + report.kept} steps"
    )


def converged_json(report: ConvergedReport, prompt: int) -> dict[str, Any]:
    """What prefilling one prompt until its states settled took."""
    exact_from = int(report.exact_from_B[prompt])
    return {
        "passes": int(report.passes_B[prompt]),
        "residual": float(report.residual_B[prompt]),
        "exact_from": None if exact_from < 0 else exact_from,
    }


def converged_line(found: dict[str, Any]) -> str:
    exact = (
        ""
        if found["exact_from"] is None
        else f"; computed one position at a time from position {found['exact_from']} on, where passes did not settle"
    )
    return f"converged prefill: at most {found['passes']} passes at a position, residual {found['residual']:.1e}{exact}"
