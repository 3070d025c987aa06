"""`fullband recipe`: every key of a recipe, from the schema that recipes are checked with."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLES = """Examples:

\b
  fullband recipe                          every key with its values and default
  fullband recipe optim                    one section
  fullband recipe data.source              the kinds of data
  fullband recipe --schema > recipe.json   for an editor that completes keys, or a script

A recipe is a YAML file with the sections model, data, feedback, optim, train and evaluation; only name, train.steps and a
model without a preset have no default. Any key can be set on the command line, by its dotted name:

\b
  fullband train recipes/tiny-text.yaml --set train.steps=500 --set feedback.jitter=0.05
"""


def recipe(
    section: Annotated[
        str, typer.Argument(metavar="[SECTION]", help="Section, or beginning of a dotted key, to list; default: all keys.")
    ] = "",
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema (2020-12) of a recipe.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the keys as Markdown, as in docs/recipe.md.")] = False,
) -> None:
    """List the keys of a recipe: what each may hold, its default, and what it does."""
    from fullband.cli.console import print_json
    from fullband.config import Recipe
    from fullband.recipe_keys import as_markdown, as_text, keys_of

    if schema and (section or markdown):
        raise ValueError("--schema prints the whole recipe's schema; leave out SECTION and --markdown")
    if schema:
        print_json(Recipe.model_json_schema())
        return
    keys = [key for key in keys_of(Recipe) if not section or key.name == section or key.name.startswith((f"{section}.", f"{section} "))]
    if not keys:
        raise ValueError(f"{section}: not a key of a recipe; `fullband recipe` lists them")
    typer.echo(as_markdown(keys) if markdown else as_text(keys), nl=False)
