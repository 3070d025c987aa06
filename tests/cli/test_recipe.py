"""The keys of a recipe, as the command and docs/recipe.md list them."""

from __future__ import annotations

from pathlib import Path

from cli.commands import fullband, refused
from fullband.config import Recipe
from fullband.recipe_keys import as_markdown, keys_of


def test_every_key_has_a_sentence() -> None:
    assert [key.name for key in keys_of(Recipe) if not key.does] == []


def test_the_page_is_what_the_schema_says() -> None:
    """Else: `fullband recipe --markdown > docs/recipe.md`."""
    page = Path(__file__).parents[2] / "docs" / "recipe.md"
    assert page.read_text(encoding="utf-8") == as_markdown(list(keys_of(Recipe)))


def test_sections_schema_and_what_is_no_key() -> None:
    shown = fullband("recipe", "optim").out
    assert "optim.matrix_lr\n" in shown and "default 0.01" in shown and "train.steps" not in shown
    assert "data.source [files].paths" in fullband("recipe", "data.source").out
    assert fullband("recipe", "--schema").json == Recipe.model_json_schema()
    assert "optin: not a key" in refused("recipe", "optin")
    assert max(map(len, fullband("recipe").out.splitlines())) <= 80
