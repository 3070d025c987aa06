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
    mismatch,
    plan,
    plot,
    probe,
    quickstart,
    recipe,
    runs,
    serve,
    tokenize,
    train,
)
from fullband.cli.errors import OneLineErrors
from fullband.cli.paths import at_home

app = typer.Typer(
    name="fullband",
    cls=OneLineErrors,
    help="Train, evaluate and decode full-bandwidth transformers: language models with latent feedback.",
    epilog="""Start here:

\b
  fullband quickstart                      see what latent feedback does, in two to three minutes
  fullband train tiny-text                 train a model on real text
  fullband COMMAND --help                  show the options and examples of a command
""",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help keeps the examples' lines, and errors stay short
    pretty_exceptions_enable=False,
)
app.command("quickstart", epilog=quickstart.EXAMPLES)(at_home(quickstart.quickstart))
app.command("train", epilog=train.EXAMPLES)(at_home(train.train))
app.command("runs", epilog=runs.EXAMPLES)(at_home(runs.runs))
app.command("tokenize", epilog=tokenize.EXAMPLES)(at_home(tokenize.tokenize))
app.command("compare-runs", epilog=compare_runs.EXAMPLES)(at_home(compare_runs.compare_runs))
app.command("generate", epilog=generate.EXAMPLES)(at_home(generate.generate))
app.command("evaluate", epilog=evaluate.EXAMPLES)(at_home(evaluate.evaluate))
app.command("compare", epilog=compare.EXAMPLES)(at_home(compare.compare))
app.command("lm-eval", epilog=lm_eval.EXAMPLES, context_settings=lm_eval.PASSED_ON)(at_home(lm_eval.lm_eval))
app.command("evaluate-loss", epilog=evaluate_loss.EXAMPLES)(at_home(evaluate_loss.evaluate_loss))
app.command("diagnose", epilog=diagnose.EXAMPLES)(at_home(diagnose.diagnose))
app.command("chat", epilog=chat.EXAMPLES)(at_home(chat.chat))
app.command("serve", epilog=serve.EXAMPLES, context_settings={"allow_extra_args": True})(at_home(serve.serve))
app.command("mismatch", epilog=mismatch.EXAMPLES)(at_home(mismatch.mismatch))
app.command("convert", epilog=convert.EXAMPLES)(at_home(convert.convert))
app.command("detach", epilog=detach.EXAMPLES)(at_home(detach.detach))
app.command("info", epilog=info.EXAMPLES)(at_home(info.info))
app.command("plan", epilog=plan.EXAMPLES)(at_home(plan.plan))
app.command("recipe", epilog=recipe.EXAMPLES)(recipe.recipe)
app.command("probe", epilog=probe.EXAMPLES)(at_home(probe.probe))
app.command("plot", epilog=plot.EXAMPLES)(at_home(plot.plot))
app.command("experiment", epilog=experiment.EXAMPLES)(at_home(experiment.experiment))


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fullband {version('fullband')}")
        raise typer.Exit


@app.callback()
def every_command(
    show_version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command. Exit codes: 0, 2 for anything the user can mend, 129, 130 and 143 for what a signal ended, 1 for a bug."""
    app()
