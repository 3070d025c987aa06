"""`fullband evaluate`: how good a model is on benchmarks, by decoding mode and feedback passes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullband.cli.models import AsJson, Device, Dtype
from fullband.device import resolve_device, resolve_dtype

if TYPE_CHECKING:
    from fullband.evaluate.evaluation import Watch
    from fullband.evaluate.harness.text import HarnessText
    from fullband.evaluate.plan import EvaluationPlan
    from fullband.loading import LoadedModel

EXAMPLES = """Examples:

\b
  fullband evaluate runs/mine --suite paper-mc --feedback-passes 0,1,2,4       Fig. 4 of the paper: ten tasks, five examples each
  fullband evaluate runs/mine --suite paper-0shot --baseline runs/standard     Table 2, beside a model without feedback
  fullband evaluate runs/mine arc_easy piqa --shots 0 --limit 200              any tasks of lm-eval
  fullband evaluate runs/mine --suite gsm8k                                    the three modes, greedy (Fig. 5, Fig. 6)
  fullband evaluate runs/mine --suite humaneval --prompts chat --n 10 --k 3    code, in a sandbox
  fullband evaluate runs/mine --suite mbpp --shard 1/4 -o runs/mbpp            a quarter of it; then 2/4 …, then: fullband compare runs/mbpp
  fullband evaluate runs/mine --suite paper-mc --data-dir data --dry-run       prompts only

\b
Suites: paper-mc, paper-0shot, gsm8k, math500, humaneval, mbpp.
Run the same command again to continue where it was interrupted. With another --limit or --data-dir, answers to the same prompts are kept.
Within lm-eval itself:
  fullband lm-eval run --model fullband --model_args pretrained=runs/mine,mode=fused,feedback_passes=2 --tasks hellaswag
"""


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model or run folder, or a plain Hugging Face checkpoint.")],
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="TASK…", help="Tasks of lm-eval, or gsm8k, math500, humaneval, mbpp.")
    ] = None,
    suite: Annotated[str | None, typer.Option(help="Suite of tasks: paper-mc, paper-0shot, gsm8k, math500, humaneval, mbpp.")] = None,
    feedback_passes: Annotated[
        str,
        typer.Option(
            metavar="N,exact,soft,…",
            help="Feedback passes to compare on multiple-choice tasks. soft: context without feedback, continuation with.",
        ),
    ] = "0,1",
    modes: Annotated[str, typer.Option(metavar="MODE,…", help="Decoding modes to compare on free-form tasks.")] = "standard,soft,fused",
    fused_passes: Annotated[str, typer.Option(metavar="N|exact|converged", help="Feedback passes over the prompt in fused mode.")] = "1",
    baseline: Annotated[str | None, typer.Option(metavar="MODEL", help="A model without feedback to compare with.")] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Number of examples in a prompt; default: as the suite or the task defines.")
    ] = None,
    prompts: Annotated[
        str, typer.Option(help="Prompts of free-form tasks. base: with the task's examples; chat: no examples, the model's chat template.")
    ] = "base",
    temperatures: Annotated[
        str, typer.Option(metavar="T,…", help="Sampling temperatures for code; the best is chosen for each mode.")
    ] = "0.3,0.5,0.7",
    n: Annotated[int, typer.Option(min=1, help="Samples of each code problem at each temperature.")] = 10,
    k: Annotated[int, typer.Option(min=1, help="k of Pass@k for code.")] = 3,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of new tokens in an answer; default: 512, for MATH-500 1024.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many documents of each task, from the first on.")] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Evaluate part I of N, to share the work between processes.")] = "1/1",
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with local data, a subfolder for each task; default: load them from the hub.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Output folder; default: runs/evaluate/MODEL-TASKS.")
    ] = None,
    batch_rows: Annotated[int, typer.Option(min=1, help="Number of sequences in a batch.")] = 8,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes for grading answers.")] = 1,
    unsandboxed: Annotated[
        bool, typer.Option("--unsandboxed", help="Run the code that the model wrote outside the sandbox: unsafe.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for sampling.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the prompts; load no model.")] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on benchmarks.

    Multiple-choice tasks by feedback passes, free-form ones by decoding mode, with standard errors and paired tests. Prompts are lm-eval's
    own. Writes results.json, report.md and report.html.
    """
    from fullband.cli.console import messages
    from fullband.cli.progress import counted_progress
    from fullband.cli.quiet import quiet_transformers
    from fullband.evaluate.evaluation import load_material
    from fullband.evaluate.harness.model import small_files
    from fullband.evaluate.harness.tasks import offline
    from fullband.evaluate.harness.text import HarnessText
    from fullband.evaluate.plan import EvaluationPlan, check_folder, plan_names
    from fullband.evaluate.report.results import BASELINE, gather_baseline
    from fullband.feedback_config import parse_feedback_passes

    if data_dir is not None:
        offline()
    quiet_transformers()
    named = plan_names(tasks or [], suite)
    plan = EvaluationPlan(
        **named | ({"shots": shots} if shots is not None else {}),
        readings=tuple(parse_reading(part) for part in feedback_passes.split(",")),
        modes=tuple(dict.fromkeys(mode.strip() for mode in modes.split(","))),
        fused_passes=parse_feedback_passes(fused_passes, "--fused-passes"),
        prompts=parse_prompts(prompts),
        temperatures=tuple(parse_number(part, "--temperatures") for part in temperatures.split(",")),
        n=n,
        k=k,
        new_tokens=max_new_tokens,
        seed=seed,
        limit=limit,
        shard=parse_shard(shard),
    )
    check_modes(plan)
    precision = resolve_dtype(dtype)
    text = HarnessText.of_folder(small_files(model))
    text_of_baseline = HarnessText.of_folder(small_files(baseline)) if baseline is not None else text
    if dry_run:
        print_prompts(plan, text, data_dir, as_json)
        return
    folder = output or Path("runs/evaluate") / f"{Path(model).name}-{suite or '-'.join(tasks or [])}"
    whole = folder
    if plan.shard[1] > 1:
        folder = folder / f"shard-{plan.shard[0] + 1}-of-{plan.shard[1]}"
    if {"humaneval", "mbpp"} & set(plan.generative):
        make_sandbox(unsandboxed)  # refused before hours of answers
    part = folder / BASELINE
    if baseline is not None:  # refused before hours of the model; one model in memory at a time
        check_folder(part, plan.of_baseline(), open_subject(baseline, device, precision).about)
    subject = open_subject(model, device, precision)
    if subject.standard_only:
        plan = plan.of_baseline()
    was_begun = check_folder(folder, plan, subject.about)
    if baseline is None:
        gather_baseline([folder], plan)  # refused too: one that this can't be laid beside
    if was_begun:
        messages().print(f"continuing {folder}", soft_wrap=True)
    with counted_progress(messages()) as watch:
        material = load_material(plan, text, data_dir)
        run_part(subject, text, plan, material, folder, watch, batch_rows, workers, unsandboxed)
        if baseline is not None:
            other = open_subject(baseline, device, precision)
            beside = load_material(plan, text_of_baseline, data_dir) if plan.prompts == "chat" else material

            def watch_baseline(what: str, done: int, total: int) -> None:
                watch(f"baseline: {what}", done, total)

            run_part(other, text_of_baseline, plan.of_baseline(), beside, part, watch_baseline, batch_rows, workers, unsandboxed)
    finish(whole if plan.shard[1] == 1 else folder, plan, as_json)


class Subject:
    """A model that was opened, and what results.json says of it."""

    def __init__(self, name: str, network: LoadedModel, dtype: str, weights: str | None, files: str):
        from fullband.loading import is_standard_only

        self.network = network
        self.standard_only = is_standard_only(network)
        self.about = {
            "name": name,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "weights": weights,
            "files": files,
            "dtype": dtype,
            "device": str(network.trunk.device),
            "plain": self.standard_only,
        }


def open_subject(name: str, device: str, precision: Any) -> Subject:
    """Raises ValueError for what is no model or device."""
    from fullband.evaluate.harness.model import small_files
    from fullband.evaluate.plan import files_hash, weights_hash
    from fullband.loading import load_model

    network = load_model(name, resolve_device(device, "--device"), precision, plain=True)
    folder = small_files(name)
    return Subject(name, network, str(precision).removeprefix("torch."), weights_hash(folder), files_hash(folder))


def run_part(
    subject: Subject,
    text: HarnessText,
    plan: EvaluationPlan,
    material: Any,
    folder: Path,
    watch: Watch,
    batch_rows: int,
    workers: int,
    unsandboxed: bool,
) -> None:
    from fullband.evaluate.evaluation import evaluate as run
    from fullband.evaluate.evaluation import hashes
    from fullband.evaluate.plan import check_folder, start
    from fullband.files import alone_in

    check_folder(folder, plan, subject.about)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        check_folder(folder, plan, subject.about)  # again: another process may have been at work there
        start(folder, plan, subject.about, hashes(material, plan))
        run(
            subject.network,
            text,
            plan,
            material,
            folder,
            batch_rows=batch_rows,
            workers=workers,
            sandbox=lambda: make_sandbox(unsandboxed),
            watch=watch,
        )


def make_sandbox(unsandboxed: bool) -> Any:
    from fullband.evaluate.sandbox import Sandbox

    return Sandbox(sandboxed=not unsandboxed)


def finish(folder: Path, plan: EvaluationPlan, as_json: bool) -> None:
    """Results, reports and the tables in the terminal; of a shard only where it is."""
    from fullband.cli.compare import print_results, write_report
    from fullband.cli.console import messages, output, print_json

    if plan.shard[1] > 1:
        together = shlex.join(["fullband", "compare", str(folder.parent)])
        messages().print(f"{folder}: done; once all shards are done, run: {together}", soft_wrap=True)
        return
    results = write_report(folder)
    print_json(results) if as_json else print_results(output(), results)
    messages().print(f"report: {folder / 'report.html'}", soft_wrap=True)


def print_prompts(plan: EvaluationPlan, text: HarnessText, data_dir: Path | None, as_json: bool) -> None:
    from fullband.cli.console import output, print_json
    from fullband.evaluate.evaluation import load_material, show_prompts

    shown = show_prompts(load_material(plan, text, data_dir), plan)
    if as_json:
        print_json({"prompts": [one | {"tokens": len(text.encode(one["prompt"]))} for one in shown]})
        return
    for one in shown:
        output().rule(f"{one['task']}, document {one['document']}: {len(text.encode(one['prompt']))} tokens")
        output().print(one["prompt"], soft_wrap=True)
        for continuation in one.get("continuations", []):
            if continuation is not None:
                output().print(f"→ {continuation!r}", soft_wrap=True)


def check_modes(plan: EvaluationPlan) -> None:
    """Raises ValueError for a mode that does not exist."""
    from fullband.decode import resolve_mode

    for mode in plan.modes:
        resolve_mode(mode, plan.fused_passes if mode == "fused" else None)


def parse_reading(part: str) -> Any:
    """Raises ValueError."""
    from fullband.feedback_config import parse_feedback_passes

    return "soft" if part.strip() == "soft" else parse_feedback_passes(part, "--feedback-passes")


def parse_prompts(name: str) -> Any:
    if name not in ("base", "chat"):
        raise ValueError(f"--prompts: must be base or chat, got '{name}'")
    return name


def parse_number(part: str, option: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise ValueError(f"{option}: must be numbers separated by commas, got '{part}'") from None


def parse_shard(text: str) -> tuple[int, int]:
    """ "2/4" is (1, 4). Raises ValueError."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal()):
        raise ValueError(f"--shard: must be I/N, such as 2/4, got '{text}'")
    return int(first) - 1, int(count)
