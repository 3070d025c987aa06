"""`fullband generate`: continue a prompt."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from fullband.cli.models import AsJson, Device, Dtype, ModelFolder, open_model, parse_feedback_passes

DEFAULT_NEW_TOKENS = 256
CHUNK = 512  # positions of a prompt read at a time: the result does not depend on it, memory and the progress bar do

EXAMPLES = """Examples:

\b
  fullband generate runs/tiny-text "def mean(values):"
  fullband generate runs/tiny-text "import " --mode standard --temperature 0.8 --seed 1
  fullband generate runs/tiny-text "class Stack:" --mode fused --feedback-passes exact --json
"""


def generate(
    model: ModelFolder,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    mode: Annotated[str, typer.Option(help="standard: no feedback. soft: plain prompt, fused generation. fused: both fused.")] = "soft",
    feedback_passes: Annotated[
        str | None, typer.Option(metavar="N|exact", help="How fused reads the prompt: 1 (default), 2, … passes, or position by position.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help=f"Default: {DEFAULT_NEW_TOKENS}, or as many as the context has room for.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the draws, where the temperature is not 0.")] = 0,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text as it is made, or when it is complete.")] = True,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt.

    The continuation alone goes to stdout.
    """
    from fullband.cli.console import messages, print_json
    from fullband.cli.reading import positions_to_read, reading_progress
    from fullband.decode import generate_text, resolve_mode

    passes = None if feedback_passes is None else parse_feedback_passes(feedback_passes)
    resolved = resolve_mode(mode, passes)
    network, tokenizer, folder = open_model(model, device, dtype)
    length = len(tokenizer.encode(prompt))
    if max_new_tokens is None:
        max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, network.trunk.context - length))
    begun = time.perf_counter()
    streams = stream and not as_json
    with reading_progress(messages(), network, positions_to_read(length, [resolved.feedback_passes]), "reading the prompt"):
        completion = generate_text(
            network,
            tokenizer,
            prompt,
            mode,
            passes,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            chunk=CHUNK,
            on_text=(lambda text: print(text, end="", flush=True)) if streams else None,
        )
    if as_json:
        print_json(
            {
                "model": str(folder),
                "mode": resolved.name,
                "feedback_passes": resolved.feedback_passes,
                "prompt": prompt,
                "prompt_tokens": length,
                "text": completion.text,
                "tokens": completion.tokens,
                "finish_reason": completion.finish_reason,
                "temperature": temperature,
                "seed": seed,
                "seconds": time.perf_counter() - begun,
            }
        )
    else:
        print("" if streams else completion.text)
