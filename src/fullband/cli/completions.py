"""What `fullband generate` and `fullband chat` were asked, and what generation took, as JSON and in a line."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from fullband.decode.modes import Mode
from fullband.decode.options import GenerateOptions
from fullband.decode.speculate import SpeculationReport

if TYPE_CHECKING:
    from fullband.feedback.converged import ConvergedReport

DEFAULT_NEW_TOKENS = 256
CHUNK = 512  # positions of a prompt run at a time: the result does not depend on it, memory and the progress bar do
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "n")
LIMITS = ("max_new_tokens", "min_new_tokens", "max_length", "overflow")


@dataclass(frozen=True)
class Request:
    """The options of generation, and the numbers the model computes in."""

    options: GenerateOptions
    dtype: str = "float32"
    quantize: str | None = None

    def within(self, context: int) -> Request:
        """Where no number of tokens was asked for: DEFAULT_NEW_TOKENS, or as many as the context has room for."""
        options = self.options
        if options.max_new_tokens is not None or options.max_length is not None:
            return self
        max_length = None if options.overflow == "slide" else context
        return replace(self, options=replace(options, max_new_tokens=DEFAULT_NEW_TOKENS, max_length=max_length))

    @property
    def mode(self) -> Mode:
        return self.options.resolved_mode

    def in_mode(self, mode: Mode) -> Request:
        return replace(self, options=replace(self.options, mode=mode.name, feedback_passes=mode.feedback_passes))

    def to_json(self) -> dict[str, Any]:
        """All that decides what text is made, but for model, prompt and mode."""
        options = self.options
        return {name: getattr(options, name) for name in (*SAMPLING, *LIMITS)} | {
            "stop": list(options.stop_strings),
            "speculate": None if options.speculation is None else asdict(options.speculation),
            "dtype": self.dtype,
            "quantize": self.quantize,
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
