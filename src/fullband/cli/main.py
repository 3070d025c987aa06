"""`fullband`: the commands, and what holds for all of them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from fullband.cli import (
    chat,
    compare,
    compare_runs,
    convert,
    detach,
    diagnose,
    evaluate,
    evaluate_loss,
    experiment,
    generate,
    info,
    lm_eval,
    plot,
    probe,
    quickstart,
    train,
)
from fullband.cli.errors import OneLineErrors

app = typer.Typer(
    name="fullband",
    cls=OneLineErrors,
    help="Train, read and decode full-bandwidth transformers: language models with latent feedback.",
    epilog="""Start here:

\b
  fullband quickstart                      what latent feedback does, in two to three minutes
  fullband train recipes/tiny-text.yaml    train a model on real text
  fullband COMMAND --help                  options and examples of a command
""",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help keeps the examples' lines, and errors stay short
    pretty_exceptions_enable=False,
)
app.command("quickstart", epilog=quickstart.EXAMPLES)(quickstart.quickstart)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("compare-runs", epilog=compare_runs.EXAMPLES)(compare_runs.compare_runs)
app.command("generate", epilog=generate.EXAMPLES)(generate.generate)
app.command("evaluate", epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("compare", epilog=compare.EXAMPLES)(compare.compare)
app.command("lm-eval", epilog=lm_eval.EXAMPLES, context_settings=lm_eval.PASSED_ON)(lm_eval.lm_eval)
app.command("evaluate-loss", epilog=evaluate_loss.EXAMPLES)(evaluate_loss.evaluate_loss)
app.command("diagnose", epilog=diagnose.EXAMPLES)(diagnose.diagnose)
app.command("chat", epilog=chat.EXAMPLES)(chat.chat)
app.command("convert", epilog=convert.EXAMPLES)(convert.convert)
app.command("detach", epilog=detach.EXAMPLES)(detach.detach)
app.command("info", epilog=info.EXAMPLES)(info.info)
app.command("probe", epilog=probe.EXAMPLES)(probe.probe)
app.command("plot", epilog=plot.EXAMPLES)(plot.plot)
app.command("experiment", epilog=experiment.EXAMPLES)(experiment.experiment)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fullband {version('fullband')}")
        raise typer.Exit


@app.callback()
def every_command(
    show_version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def main() -> None:
    """The entry point. Exit codes: 0, 2 for anything the user can mend, 130 and 143 for a run that was stopped and saved, 1 for a bug."""
    app()
