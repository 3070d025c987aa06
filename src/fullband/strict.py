"""Typed sections that accept no unknown key, and what is wrong with one in a single line that names the nearest known key."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def _text_of_place(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def one_is_a_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, os.PathLike)) else value


Place = Annotated[str, BeforeValidator(_text_of_place), AfterValidator(os.path.expanduser)]
"""A path, or a name where one is allowed: ~ is the home folder."""

Places = Annotated[list[Place], BeforeValidator(one_is_a_list)]
"""Paths; one may stand alone."""

Schema = TypeVar("Schema", bound=BaseModel)
Value = TypeVar("Value")


class _Loader(yaml.SafeLoader):
    """YAML whose sections hold a key once: elsewhere the last of two silently wins."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ValueError(f"{key.value}: must be given once in a section, is given again in line {key.start_mark.line + 1}")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """The value of a YAML text. Raises ValueError in one line for text that is none, for a key that is given twice in a section, and for
    values that look like a number or a date and are none."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except (ValueError, yaml.YAMLError) as error:  # ValueErrors of Python's own, too: "month must be in 1..12"
        raise ValueError(" ".join(str(error).split()).partition("; use sys.")[0]) from None


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping of keys of a YAML file. Raises ValueError in one line naming the file, and `what` it should be."""
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: not readable as yaml: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: {what} is a mapping of keys; this file holds {'nothing' if raw is None else type(raw).__name__}")
    return raw


def parse(schema: type[Schema], raw: Any, where: str) -> Schema:
    """Validate `raw` against `schema`; ValueError in one line naming `where`, the key and the nearest known key."""
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise ValueError(f"{where}: {_first_problem(schema, raw, error)}") from None


def shape(name: str, **keys: Any) -> Any:
    """What must be there of a JSON object, whatever else is: keys with their types, or (type, default) of one that may be missing."""
    fields: dict[str, Any] = {key: kind if isinstance(kind, tuple) else (kind, ...) for key, kind in keys.items()}
    return create_model(name, __config__=ConfigDict(strict=True), **fields)


def list_of(kind: Any, least: int = 0) -> Any:
    """For `shape`: a list of at least so many of a kind."""
    return Annotated[list[kind], Field(min_length=least)]


def _first_problem(schema: type[BaseModel], raw: Any, error: ValidationError) -> str:
    """The problem to mend first, in words. Where a value may be one of several kinds, the kind that it came nearest to speaks."""
    located = [(_location(raw, problem), problem) for problem in error.errors()]
    deeper = {place[:n] for place, _ in located for n in range(len(place))}
    problems = [(place, p) for place, p in located if len(p["loc"]) == len(place) or place not in deeper]
    place, problem = next((found for found in problems if found[1]["type"] == "extra_forbidden"), problems[0])
    key = ".".join(place)
    others = len({other for other, _ in problems}) - 1
    more = f" (and {others} more)" if others else ""
    if problem["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(place[-1], _keys_at(schema, [str(part) for part in problem["loc"][:-1]]), n=1, cutoff=0.0)
        return f"{key}: unknown key" + (f"; did you mean '{nearest[0]}'?" if nearest else "") + more
    if problem["type"] == "missing":
        return f"{key}: required, but not given{more}"
    message = " or ".join(
        _message(p) if n == 0 else _message(p).removeprefix("must be ") for n, p in enumerate(p for other, p in problems if other == place)
    )
    given = problem.get("input")
    if isinstance(given, int) and abs(given) > 10**30:
        return f"{key}: {message}, got a number of {round(given.bit_length() * 0.30103)} digits{more}"
    shown = f", got {_short(repr(given))}" if given is None or isinstance(given, (str, int, float, bool)) else ""
    return f"{key}: {message}{shown}{more}".removeprefix(": ")  # of the whole: no key


PLAIN_WORDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid list": "a list",
    "a valid boolean": "true or false",
    "list should have": "must have",
    " after validation": "",
}


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _message(problem: Any) -> str:
    """What must hold, in a recipe author's words instead of pydantic's."""
    if problem["type"] == "model_type":
        return "must be a section of keys"
    message = problem["msg"].removeprefix("Value error, ").partition(", unable to parse")[0].partition(", got a number with")[0]
    message = f"{message[0].lower()}{message[1:]}".replace("input should be ", "must be ")
    for words, ours in PLAIN_WORDS.items():
        message = message.replace(words, ours)
    return message


def _location(raw: Any, problem: Any) -> tuple[str, ...]:
    """The path of a problem as the recipe's author wrote it: the schema's names for the branches of a union are left out."""
    place: list[str] = []
    parts = problem["loc"]
    for n, part in enumerate(parts):
        missing = n == len(parts) - 1 and problem["type"] == "missing"
        if isinstance(raw, dict) and (part in raw or missing):
            raw = raw.get(part)
        elif isinstance(raw, (list, tuple)) and isinstance(part, int) and part < len(raw):
            raw = raw[part]
        else:
            continue
        place.append(str(part))
    return tuple(place)


def _keys_at(schema: type[BaseModel], path: list[str]) -> list[str]:
    """Known keys of the section at `path`; a discriminated union's branch is named by its kind in the path."""
    sections: list[type[BaseModel]] = [schema]
    for part in path:
        below = [m for s in sections if part in s.model_fields for m in _models_in(s.model_fields[part].annotation)]
        if below:
            sections = below
        else:
            kinds = [s for s in sections if "kind" in s.model_fields and s.model_fields["kind"].default == part]
            sections = kinds or sections
    return [name for s in sections for name in s.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for a in get_args(annotation) for m in _models_in(a)]


def named(table: Mapping[str, Value], name: str, what: str) -> Value:
    """`table[name]`; ValueError naming the nearest name if there is none."""
    if name not in table:
        nearest = difflib.get_close_matches(name, table, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown {what} '{name}'; did you mean '{nearest}'? (known: {', '.join(table)})")
    return table[name]
