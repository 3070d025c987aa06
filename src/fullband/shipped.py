"""Recipes by path, by run folder, and by the name of one that comes with the package: `fullband train tiny-text` works in any folder."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

RUN_RECIPE = "recipe.yaml"  # of a run folder


def shipped_recipes() -> Path:
    """The folder of the recipes that came with the package: inside it when it was installed from a wheel, beside src/ in the repository."""
    package = Path(__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def find_recipe(name: str | Path) -> Path:
    """The recipe file that `name` means: a file, a run folder's own, or a shipped one ("tiny-text", "recipes/tiny-text.yaml").

    Raises ValueError that names the nearest shipped one if there is none.
    """
    path = Path(os.path.expanduser(name))
    if path.is_file():
        return path
    if path.is_dir():
        if (path / RUN_RECIPE).is_file():
            return path / RUN_RECIPE
        raise ValueError(f"{path}: a folder without a {RUN_RECIPE}: give a recipe file or a run folder")
    shipped = shipped_recipes()
    inside = path.relative_to("recipes") if path.parts[:1] == ("recipes",) else path
    if not inside.is_absolute() and ".." not in inside.parts:
        for found in (shipped / inside, shipped / f"{inside}.yaml"):
            if found.is_file():
                return found
    known = [file.stem for file in sorted(shipped.glob("*.yaml"))]
    nearest = difflib.get_close_matches(inside.stem, known, n=1)
    raise ValueError(f"{path}: no such recipe file" + (f"; did you mean '{nearest[0]}'?" if nearest else ""))


def is_recipe(name: str | Path) -> bool:
    try:
        return find_recipe(name).is_file()
    except ValueError:
        return False
