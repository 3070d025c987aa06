"""`fullband lm-eval`: lm-eval's own command, with the model `fullband` known to it."""

from __future__ import annotations

import sys
from typing import Any

import typer

EXAMPLES = """Examples:

\b
  fullband lm-eval run --model fullband --model_args pretrained=runs/mine,mode=fused,feedback_passes=2 --tasks hellaswag --limit 50
  fullband lm-eval ls tasks

\b
Arguments of the model: pretrained, mode, feedback_passes, tokenizer, device, dtype, batch_size, max_length, add_bos_token, seed.
"""
PASSED_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def lm_eval(context: typer.Context) -> None:
    """Run lm-eval's own command, in which --model fullband is available."""
    from fullband.data.optional import optional

    optional("lm_eval", "this command", "evaluate")
    import fullband.evaluate.harness.model  # noqa: F401  registers the model

    given = context.args or ["--help"]
    before, sys.argv = sys.argv, ["fullband lm-eval", *given]
    try:
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    finally:
        sys.argv = before
