"""`fullband generate`: continue a prompt or a file of prompts, or compare the modes on them."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from fullband.cli.models import AsJson, Device, Dtype, ModelFolder, open_model

if TYPE_CHECKING:
    from fullband.cli.completions import GenerateRequest
    from fullband.decode.options import Overflow
    from fullband.decode.speculate import Speculation
    from fullband.decode.texts import NewText

EXAMPLES = """Examples:

\b
  fullband generate runs/tiny-text "def mean(values):"
  fullband generate runs/tiny-text "import " --temperature 0.8 --top-p 0.95 --n 3 --seed 1
  fullband generate runs/tiny-text "class Stack:" --mode fused --feedback-passes exact --json
  fullband generate runs/tiny-text "def mean(values):" --stop "def " --speculate
  fullband generate runs/tiny-text "def mean(values):" --dtype bfloat16 --compile --max-new-tokens 900
  fullband generate runs/tiny-text --prompts prompts.txt --output answers.jsonl       add --resume to continue after an interruption
  fullband generate runs/tiny-text "def mean(values):" --compare                      the three modes side by side
  fullband generate runs/tiny-text --prompts prompts.jsonl --compare --html modes.html

\b
Files of prompts:
  .jsonl: {"prompt": "…", "id": …} on each line; the id is optional (default: the number of the line). Other files: one prompt per line.
  Empty lines are skipped with a note; an empty "prompt" is an error. "-" is standard input, jsonl if its first line is an object.
  Output: one JSON object per completion, in the order of the prompts: id, prompt, sample, text, tokens, finish_reason, and the settings.
"""


def generate(
    model: ModelFolder,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Text to continue; for many prompts use --prompts.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="standard: no feedback. soft (default): plain prompt, fused generation. fused: both fused.")
    ] = None,
    feedback_passes: Annotated[
        str | None,
        typer.Option(
            metavar="N|exact|converged",
            help="Feedback passes over the prompt in fused mode: 1 (default), 2, …, exact (one position at a time) or converged.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of new tokens; default: 256, or what still fits the context.")
    ] = None,
    min_new_tokens: Annotated[int, typer.Option(help="Minimum number of new tokens.")] = 0,
    max_length: Annotated[
        int | None, typer.Option(help="Maximum length of prompt and continuation together, in tokens; default: the context.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens whose probabilities add up to this.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Sample only tokens with at least this fraction of the most likely token's probability.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens that already occur become less likely.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; may be repeated.")] = None,
    n: Annotated[int, typer.Option("--n", help="Number of samples for each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed for sampling.")] = 0,
    overflow: Annotated[
        str,
        typer.Option(metavar="refuse|slide", help="What to do when the context is full: refuse, or slide (continue from its last half)."),
    ] = "refuse",
    speculate: Annotated[
        bool,
        typer.Option(
            "--speculate",
            help="Self-speculation: draft tokens from repetitions in the text and check them in parallel; prints the acceptance.",
        ),
    ] = False,
    draft_length: Annotated[int | None, typer.Option(help="With --speculate: number of tokens to draft (default 8).")] = None,
    draft_passes: Annotated[int | None, typer.Option(help="With --speculate: maximum number of passes in a check (default 4).")] = None,
    draft_tolerance: Annotated[
        float | None, typer.Option(help="With --speculate: relative change below which a state counts as exact (default 0.001).")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="File of prompts, txt or jsonl; - for standard input. See below.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --prompts: write completions to this jsonl file; default: stdout.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after the completions that --output already has.")] = False,
    batch_size: Annotated[
        int, typer.Option(min=1, help="With --prompts: number of prompts decoded together; changes texts only by rounding.")
    ] = 16,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show the three modes side by side, with the first differing token marked.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --compare: write the comparison as an HTML page that works offline.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text as it is generated, or once it is complete.")] = True,
    device: Device = "auto",
    dtype: Dtype = "float32",
    quantize: Annotated[str | None, typer.Option(metavar="int8", help="Quantize the weights to int8; needs torchao.")] = None,
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Compile the decoding step: takes a minute or more, then decodes faster. Needs a C++ compiler."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, or each of a file of prompts.

    The continuation alone goes to stdout; samples (--n) are printed under a line with their number.
    """
    from fullband.feedback_config import parse_feedback_passes

    alone = {"--mode": mode, "--n": n != 1, "--speculate": speculate, "--compile": compile, "--output": output, "--resume": resume}
    once = "--compare continues each prompt once in every mode; leave out"
    printed = prompts is not None and output is None and not compare
    for refused, why in (
        ((prompt is None) == (prompts is None), "give a PROMPT or --prompts FILE" + (", not both" if prompt is not None else "")),
        (prompts is None and (output or resume), f"{'--output' if output else '--resume'} needs --prompts FILE"),
        (resume and output is None, "--resume needs --output, the file with the completions so far"),
        (html and not compare, "--html needs --compare"),
        *((compare and given, f"{once} {name}") for name, given in alone.items()),
        (printed and as_json, "--prompts prints JSON already, a line for each completion; --json, a summary, needs --output"),
    ):
        if refused:
            raise ValueError(why)

    from fullband.cli.completions import CHUNK, DEFAULT_NEW_TOKENS, GenerateRequest, Prompt, limited, settings_json
    from fullband.cli.console import messages
    from fullband.cli.prompt_files import check_output, check_writable, read_prompts, tokenize_prompts
    from fullband.decode.options import GenerateOptions

    passes = None if feedback_passes is None else parse_feedback_passes(feedback_passes, "--feedback-passes")
    if overflow == "slide" and max_new_tokens is None and max_length is None:
        max_new_tokens = DEFAULT_NEW_TOKENS
    options = GenerateOptions(
        mode="fused" if compare else "soft" if mode is None else mode,
        feedback_passes=passes,
        stop=stop or (),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        max_length=max_length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        n=n,
        seed=seed,
        overflow=cast("Overflow", overflow),
        speculation=speculation_of(speculate, draft_length, draft_passes, draft_tolerance),
        compile=compile,
        chunk=CHUNK,
    )
    if output:
        check_output(output, resume)
    if html:
        check_writable(html)
    notes: list[str] = []
    chosen = [Prompt(prompt)] if prompt is not None else read_prompts(str(prompts), notes.append)
    network, tokenizer, folder = open_model(model, device, dtype)
    if quantize is not None:
        from fullband.decode.quantize import quantize as quantized

        network = quantized(network, quantize)
    options = limited(options, network.trunk.context)
    tokens = tokenize_prompts(chosen, tokenizer, network.trunk, options)
    request = GenerateRequest(network, tokenizer, folder, chosen, tokens, options, settings_json(options, dtype, quantize))
    for note in notes:  # not before: a refusal is one line
        messages().print(note, soft_wrap=True)
    try:
        if compare:
            run_comparison(request, batch_size, html, as_json, listed=prompts is not None)
        elif prompts is None:
            continue_prompt(request, stream, as_json)
        else:
            continue_file(request, batch_size, output, as_json)
    except KeyboardInterrupt:
        interrupted(output)


def speculation_of(asked: bool, length: int | None, passes: int | None, tolerance: float | None) -> Speculation | None:
    """The settings that were given, defaults elsewhere. Raises ValueError for some that were given without being asked for."""
    from fullband.decode import Speculation

    numbers: dict[str, Any] = {"draft_length": length, "max_passes": passes, "tolerance": tolerance}
    given = {name: number for name, number in numbers.items() if number is not None}
    if given and not asked:
        raise ValueError("--draft-length, --draft-passes and --draft-tolerance need --speculate")
    return Speculation(**given) if asked else None


def continue_prompt(request: GenerateRequest, stream: bool, as_json: bool) -> None:
    """One prompt to stdout: its continuation as it is made, its samples one after the other, or everything as one JSON object."""
    from fullband.cli.completions import converged_json, converged_line, speculation_json, speculation_line
    from fullband.cli.console import messages, print_json
    from fullband.cli.progress import forward_progress
    from fullband.decode.texts import TextStream
    from fullband.feedback.by_passes import positions_to_run

    begun, n, mode, length = time.perf_counter(), request.options.n, request.options.resolved_mode, len(request.tokens[0])
    streams = stream and not as_json and n == 1
    with forward_progress(messages(), request.model, positions_to_run(length, [mode.feedback_passes]), "prefilling the prompt"):
        made = TextStream(request.model, request.tokenizer, request.tokens, request.options)
    converged = None if made.converged is None else converged_json(made.converged, 0)
    completions = []
    for sample, completion in enumerate(made.completions(lambda new: print(new.texts.get(0, ""), end="", flush=True) if streams else None)):
        completions.append(completion)
        if not as_json and not streams:
            print(f"--- sample {sample + 1} of {n}\n{completion.text}" if n > 1 else completion.text)
    speculates = request.options.speculation is not None
    if as_json:
        print_json(
            {
                "model": str(request.folder),
                "mode": mode.name,
                "feedback_passes": mode.feedback_passes,
                "prompt": request.prompts[0].text,
                "prompt_tokens": length,
                "completions": [{"sample": sample, **completion.to_json()} for sample, completion in enumerate(completions)],
                "settings": request.settings,
                "converged": converged,
                "speculation": speculation_json(made.speculation) if speculates else None,
                "seconds": time.perf_counter() - begun,
            }
        )
        return
    if streams:
        print()
    if converged is not None:
        messages().print(converged_line(converged), soft_wrap=True)
    if speculates:
        messages().print(speculation_line(made.speculation), soft_wrap=True)


def continue_file(request: GenerateRequest, batch_size: int, output: Path | None, as_json: bool) -> None:
    """A line of JSON for each completion, to `output` or stdout."""
    import sys

    from fullband.amounts import duration, short
    from fullband.cli.completions import speculation_json, speculation_line
    from fullband.cli.console import messages, print_json
    from fullband.cli.progress import BatchProgress
    from fullband.cli.prompt_files import FileJob, open_output

    job = FileJob(request, batch_size)
    limit = max(request.options.limits([len(tokens) for tokens in request.tokens], request.model.trunk))
    if output is not None:
        job.skip_written(output)
    before, begun, console = job.written, time.perf_counter(), messages()
    with open_output(output) as file:  # before the bar: what is written here must not go where the bar is drawn
        if before and before < job.total:
            console.print(f"{output}: has {before} of {job.total} completions; continuing", soft_wrap=True)
        with BatchProgress(console, job.total, limit, quiet=output is None and sys.stdout.isatty()) as progress:
            job.run(file, progress)
    seconds, made = time.perf_counter() - begun, job.written - before
    speculates = request.options.speculation is not None
    if as_json:
        print_json(
            {
                "output": str(output),
                "prompts": len(request.prompts),
                "completions": job.total,
                "made_now": made,
                "tokens": job.tokens,
                "seconds": seconds,
                "speculation": speculation_json(job.speculation) if speculates else None,
            }
        )
        return
    done = f"{made} completions, {short(job.tokens)} tokens, {duration(seconds)}" if made else "nothing left to do"
    console.print(f"{output or 'stdout'}: {done}", soft_wrap=True)
    if speculates and made:
        console.print(speculation_line(job.speculation), soft_wrap=True)


def run_comparison(request: GenerateRequest, batch_size: int, html: Path | None, as_json: bool, listed: bool) -> None:
    """The three modes side by side: in the terminal, as JSON, and as a page."""
    from fullband.cli import comparison
    from fullband.cli.comparison_page import page
    from fullband.cli.console import messages, output, print_json
    from fullband.cli.progress import counted_progress
    from fullband.decode.compare_modes import compare_modes
    from fullband.files import write_bytes

    texts = [prompt.text for prompt in request.prompts]
    finished: Counter[str] = Counter()
    with counted_progress(messages(), announce=False) as watch:

        def on_step(mode: str, start: int, new: NewText) -> None:
            finished[mode] += len(new.finished)
            watch(mode, finished[mode], len(texts))

        found = compare_modes(request.model, request.tokenizer, texts, request.options, request.tokens, batch_size, on_step)
    described = comparison.to_json(found, [prompt.id for prompt in request.prompts], str(request.folder), request.settings)
    if html:
        write_bytes(html, page(found, described).encode())
    if as_json:
        print_json(described)
    else:
        comparison.print_comparison(output(), found, described, listed)
    if html:
        messages().print(f"{html}: written; open it in a browser", soft_wrap=True)


def interrupted(output: Path | None) -> NoReturn:
    """Ctrl-C: say what is left to do, exit code 130."""
    from fullband.cli.console import messages

    hint = f"stopped; {output} keeps its completions, continue with the same command and --resume" if output else "stopped"
    messages().print(f"\n{hint}", soft_wrap=True)
    raise typer.Exit(130) from None
