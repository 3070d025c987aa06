"""Values and questions as lines of JSON. Nothing that is read can run code, so the tester may read what a hostile solution wrote.

Data (numbers, text, containers, dates, …) crosses by value, subclasses as the plain type they extend; every other object of the solution
stays where it is and crosses as a reference. Built-in functions and types cross by name.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import json
import os
import types
from collections.abc import Callable, Iterable
from typing import Any

MOST_BYTES = 16 << 20  # of one message

_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)
}  # a deque loses its maximal length, which does not take part in comparisons
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {kind.__name__: kind for kind in (collections.Counter, collections.OrderedDict, dict)}
# Types that cross by value, after those above: what is written of a value, and what makes one of that. A subclass stands before its base.
_Codec = tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]
_RARE: dict[str, _Codec] = {
    "bytearray": (bytearray, lambda value: [value.hex()], bytearray.fromhex),
    "bytes": (bytes, lambda value: [value.hex()], bytes.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], complex),
    "range": (range, lambda value: [hex(bound) for bound in (value.start, value.stop, value.step)], lambda *at: range(*map(_from_hex, at))),
    "Fraction": (fractions.Fraction, lambda value: [str(value)], fractions.Fraction),
    "Decimal": (decimal.Decimal, lambda value: [str(value)], decimal.Decimal),
    "datetime": (datetime.datetime, lambda value: [value.isoformat()], datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda value: [value.isoformat()], datetime.date.fromisoformat),
    "time": (datetime.time, lambda value: [value.isoformat()], datetime.time.fromisoformat),
    "timedelta": (datetime.timedelta, lambda value: [value.days, value.seconds, value.microseconds], datetime.timedelta),
}


def _from_hex(written: str) -> int:
    return int(written, 16)


class Channel:
    """Messages over two file descriptors, one JSON line each."""

    def __init__(self, reading: int, writing: int):
        self.reading, self.writing = reading, writing
        self.buffer = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        line = memoryview(json.dumps(message).encode("ascii") + b"\n")
        while line:
            line = line[os.write(self.writing, line) :]

    def receive(self) -> dict[str, Any]:
        """The next message. Raises EOFError if the other side is gone, ValueError if it sent no JSON object or one that is too long."""
        while b"\n" not in self.buffer:
            chunk = os.read(self.reading, 1 << 16)
            if not chunk:
                raise EOFError
            self.buffer += chunk
            if len(self.buffer) > MOST_BYTES:
                raise ValueError(f"an answer is longer than {MOST_BYTES >> 20} MiB")
        line, _, self.buffer = self.buffer.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("an answer is not a message")
        return message


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """JSON of a value; `refer` makes the JSON of what is not data. Raises RecursionError for a container within itself."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < 1 << 63 else ["int", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["named", type(value).__name__, list(value._fields), *(encode(item, refer) for item in value)]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):  # type: ignore[arg-type]  # they are types
            return [name, *(encode(item, refer) for item in value)]
    for name, mapping in _MAPPINGS.items():
        if isinstance(value, mapping):
            return [name, *(encode(item, refer) for pair in dict.items(value) for item in pair)]
    return _encode_rare(value, refer)


def _encode_rare(value: Any, refer: Callable[[Any], Any]) -> Any:
    for name, (rare, write, _) in _RARE.items():
        if isinstance(value, rare):
            return [name, *write(value)]
    if isinstance(value, (type, types.BuiltinFunctionType)):
        name = value.__name__
        return ["builtin", name] if getattr(builtins, name, None) is value else refer(value)
    if value is Ellipsis:
        return ["builtin", "Ellipsis"]
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encode(value.item(), refer)  # a numpy scalar
    return refer(value)


def decode(value: Any, resolve: Callable[[Any], Any]) -> Any:
    """The value that JSON stands for; `resolve` finds what is not data (built-ins, references). Raises ValueError, or another exception of
    a constructor, for what `encode` does not write."""
    if isinstance(value, dict):
        raise ValueError("an answer is no value")
    if not isinstance(value, list):
        return value
    kind, *content = value
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, resolve) for item in content)
    if kind in _MAPPINGS:
        items = [decode(item, resolve) for item in content]
        return _MAPPINGS[kind](dict(zip(items[::2], items[1::2], strict=True)))  # a Counter counts pairs, and takes a dict as counted
    if kind == "named":
        make: Callable[..., Any] = collections.namedtuple  # raises unless all of these are names
        name, fields, *content = content
        return make(name, fields)(*(decode(item, resolve) for item in content))
    if kind == "int":
        return _from_hex(content[0])
    return _RARE[kind][2](*content) if kind in _RARE else resolve(value)
