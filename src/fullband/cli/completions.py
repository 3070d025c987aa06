"""What `fullband generate` was asked, completions as they come, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from fullband.decode.generate import NewText, TextCompletion, row_texts, text_steps
from fullband.decode.modes import Mode
from fullband.decode.options import GenerateOptions, Settings
from fullband.decode.prefill import prefill_converged
from fullband.decode.prompts import align_prompts
from fullband.decode.rows import kept_of
from fullband.decode.speculate import SpeculationReport
from fullband.decode.steps import TokenStream, stream, stream_from
from fullband.decode.stops import check_stop_strings

if TYPE_CHECKING:
    from fullband.data.tokenizer import Tokenizer
    from fullband.feedback.converged import ConvergedReport
    from fullband.loading import LoadedModel

DEFAULT_NEW_TOKENS = 256
CHUNK = 512  # positions of a prompt read at a time: the result does not depend on it, memory and the progress bar do
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "n")
LIMITS = ("max_new_tokens", "min_new_tokens", "max_length", "overflow")


@dataclass(frozen=True)
class Request:
    """Mode, stop strings, the keywords of `GenerateOptions` that the command line sets, and the numbers the model computes in.

    Raises ValueError for what means nothing.
    """

    mode: Mode
    stop: tuple[str, ...]
    settings: Settings
    dtype: str = "float32"
    quantize: str | None = None

    def __post_init__(self) -> None:
        check_stop_strings(self.stop)
        GenerateOptions(**self.settings)

    def within(self, context: int) -> Request:
        """Where no number of tokens was asked for: DEFAULT_NEW_TOKENS, or as many as the context has room for."""
        if self.settings.get("max_new_tokens") is not None or self.settings.get("max_length") is not None:
            return self
        settings: Settings = {**self.settings, "max_new_tokens": DEFAULT_NEW_TOKENS}
        if settings.get("overflow") != "slide":
            settings["max_length"] = context
        return replace(self, settings=settings)

    @property
    def options(self) -> GenerateOptions:
        return GenerateOptions(**self.settings)

    @property
    def samples(self) -> int:
        return self.settings.get("n", 1)

    def to_json(self) -> dict[str, Any]:
        """All that decides what text is made, but for model, prompt and mode."""
        options = self.options
        return {name: getattr(options, name) for name in (*SAMPLING, *LIMITS)} | {
            "stop": list(self.stop),
            "speculate": None if options.speculation is None else asdict(options.speculation),
            "dtype": self.dtype,
            "quantize": self.quantize,
        }


class Completing:
    """The completions of some prompts, under way: iterate over their steps.

    converged    what reading the prompts until the states settled took; None for other readings
    speculation  what self-speculation did so far
    """

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer, prompts: Sequence[str], request: Request, first_key: int = 0):
        """The prompts are read here. Row r is sample r % n of prompt r // n; a prompt's draws are keyed by its number + `first_key`."""
        settings: Settings = {**request.settings, "keys": range(first_key, first_key + len(prompts)), "chunk": CHUNK}
        settings["stop_ids"] = [token for token in tokenizer.stops if token < model.trunk.vocab_size]
        self.converged: ConvergedReport | None = None
        tokens = [tokenizer.begin(prompt) for prompt in prompts]
        self._steps = self._read(model, tokens, request, settings)
        self.rows = self._steps.rows
        self._texts = row_texts(tokenizer, tokens, request.stop, self.rows, settings.get("min_new_tokens", 0))

    def _read(self, model: LoadedModel, tokens: list[list[int]], request: Request, settings: Settings) -> TokenStream:
        mode = request.mode
        passes = mode.feedback_passes if mode.name == "fused" else None
        if passes != "converged":
            return stream(model, tokens, mode.name, passes, **settings)
        context = model.trunk.context
        if request.options.overflow == "slide":
            tokens = [row if len(row) <= context else row[-kept_of(context) :] for row in tokens]
        state, self.converged = prefill_converged(model, align_prompts(model.trunk, tokens))
        return stream_from(model, state, mode.name, passes, prompts=tokens, **settings)

    @property
    def speculation(self) -> SpeculationReport:
        return self._steps.speculation_report

    def __iter__(self) -> Iterator[NewText]:
        return text_steps(self._steps, self._texts)

    def in_order(self, watch: Callable[[NewText], None]) -> Iterator[TextCompletion]:
        """The completion of row 0, 1, 2, …, each as soon as it and all before it are complete. `watch` sees every step."""
        tokens: list[list[int]] = [[] for _ in range(self.rows)]
        texts = [""] * self.rows
        whole: dict[int, TextCompletion] = {}
        next_row = 0
        for new in self:
            for row, token in new.tokens.items():
                tokens[row].append(token)
            for row, piece in new.texts.items():
                texts[row] += piece
            for row, reason in new.finished.items():
                whole[row] = TextCompletion(texts[row], tokens[row], reason)
            watch(new)
            while next_row in whole:
                yield whole.pop(next_row)
                next_row += 1


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
    """What reading one prompt until its states settled took."""
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
