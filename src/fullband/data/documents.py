"""Documents to evaluate a trained model on: of text files, or what a recipe holds out."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from fullband.config import FilesSource, load_recipe
from fullband.data.batch import Document
from fullband.data.build import build_loader
from fullband.data.files import Files
from fullband.data.packing import as_document
from fullband.data.records import TextRecords
from fullband.data.tokenizer import Tokenizer


def text_documents(paths: list[str], tokenizer: Tokenizer, limit: int) -> tuple[str, list[Document]]:
    """(what they are, the first documents of the files). Raises ValueError for files that can't be read."""
    if not all(path.strip() for path in paths):
        raise ValueError("--text: the name of a file must not be empty")
    reader = TextRecords("text")
    reader.setting = "data.source.text_field in a recipe, and give it as --recipe instead"
    source = Files(FilesSource(paths=paths, validation_fraction=0.0), reader)
    texts = [document for _, document in islice(source.documents("train"), limit)]
    return source.where, [as_document(tokens) for tokens in tokenizer.encode_documents(texts)]


def recipe_documents(path: Path | None, folder: Path, tokenizer: Tokenizer, limit: int) -> tuple[str, list[Document]]:
    """(what they are, documents that a recipe holds out): by default of the recipe beside the model's run."""
    own = folder.parent.parent / "recipe.yaml"
    if path is None and not own.is_file():
        raise ValueError(f"{folder}: no recipe of a run was found beside it; choose the data with --text FILE or --recipe RECIPE")
    recipe = load_recipe(path or own)
    comes_with_model = {"tokenizer": str(folder)} if recipe.data.tokenizer == "auto" else {}
    loader = build_loader(recipe.data.model_copy(update=comes_with_model), recipe.seed, 1)
    if loader.tokenizer.name != tokenizer.name:
        raise ValueError(f"{path or own}: its tokenizer is {loader.tokenizer.name}, the model's is {tokenizer.name}")
    return f"held out by {path or own}", loader.validation_documents(limit)
