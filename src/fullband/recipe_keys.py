"""The keys of a recipe as a list: names, what they may hold, defaults and descriptions, all taken from the pydantic schema."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

MARKDOWN_HEAD = """# Keys of a recipe

Every key of a recipe file. `fullband recipe --markdown > docs/recipe.md` writes this page from the schema that recipes are checked with,
and a test compares the two. `fullband recipe SECTION` prints a part of it, `fullband recipe --schema` the JSON schema.
A kind of data is given in brackets. An unknown key is an error that names the nearest known one.

| key | value | default | meaning |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Key:
    """A key by its dotted name ("data.source [chat].paths": of that kind of source), and what is said of it."""

    name: str
    holds: str
    default: str
    does: str


def keys_of(schema: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """The keys of a schema and of the sections in it, in their order."""
    for name, field in schema.model_fields.items():
        place = f"{prefix}{name}"
        sections = list(_sections(field.annotation))
        described = field.description or (_sentence(sections[0]) if len(sections) == 1 else "")
        yield Key(place, _holds(field), _default(field), described)
        for section in sections:
            kind = section.model_fields.get("kind") if len(sections) > 1 else None
            yield from keys_of(section, f"{place} [{kind.default}]." if kind else f"{place}.")


def as_text(keys: Sequence[Key]) -> str:
    """A few lines a key, 80 columns wide."""
    entries = []
    for key in keys:
        indented = {"width": 80, "initial_indent": "    ", "subsequent_indent": "    ", "break_long_words": False}
        facts = f"{key.holds}; {key.default if key.default == 'required' else f'default {key.default}'}"
        entries.append("\n".join([key.name, fill(facts, **indented), *([fill(key.does, **indented)] if key.does else [])]))  # type: ignore[arg-type]
    return "\n".join(entries) + "\n"


def as_markdown(keys: Sequence[Key]) -> str:
    """docs/recipe.md."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    return MARKDOWN_HEAD + "".join(f"| `{k.name}` | {cell(k.holds)} | `{cell(k.default)}` | {cell(k.does)} |\n" for k in keys)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The schemas that a value may be of; those inside lists included."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _sections(part)


def _sentence(section: type[BaseModel]) -> str:
    """The first sentence of a section's docstring."""
    text = " ".join((section.__doc__ or "").split())
    return re.split(r"(?<=[a-z)])\. ", text)[0].rstrip(".") if section.__doc__ else ""


def _holds(field: FieldInfo) -> str:
    limits = ((sign, getattr(limit, name, None)) for limit in field.metadata for name, sign in LIMITS.items())
    bounds = " and ".join(f"{sign} {value}" for sign, value in limits if value is not None)
    return _words(field.annotation) + (f" ({bounds})" if bounds else "")


LIMITS = {"gt": ">", "ge": "at least", "lt": "<", "le": "at most", "min_length": "length at least", "max_length": "length at most"}
WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}


def _words(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if origin is Literal:
        return ", ".join(str(value) for value in parts)
    if origin in (Union, types.UnionType):
        sections = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        if len(sections) > 1:
            return "a section of one of these kinds: " + ", ".join(str(section.model_fields["kind"].default) for section in sections)
        return " or ".join(_words(part) for part in parts)
    if origin is Annotated:
        return _words(parts[0])
    if origin is list:
        return f"list of {_words(parts[0])}"
    if origin is dict:
        return f"{{{_words(parts[0])}: {_words(parts[1])}}}"
    if origin is tuple:
        return f"{len(parts)} times {_words(parts[0])}"
    return "a section" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else "anything"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        kind = getattr(value, "kind", None)
        return f"kind: {kind}" if kind and "source" in type(value).__name__.lower() else "as below"
    return yaml.safe_dump(value if not isinstance(value, tuple) else list(value), default_flow_style=True).removesuffix("...\n").strip()
