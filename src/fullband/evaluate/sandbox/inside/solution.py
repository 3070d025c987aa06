"""The process that holds the solution: loads it, then answers the tester's questions about it until the tester is gone."""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from .confine import set_limits
from .wire import Channel, decode, encode


class Solution:
    """The solution's module, and the objects of it that the tester knows by number."""

    def __init__(self, module: types.ModuleType):
        self.module = module
        self.known: list[Any] = []
        self.number_of: dict[int, int] = {}  # by id(): `known` keeps the objects alive, so ids stay theirs

    def refer(self, value: Any) -> list[Any]:
        if isinstance(value, types.ModuleType) and value.__name__ in sys.stdlib_module_names:
            return ["module", value.__name__]
        if id(value) not in self.number_of:
            self.number_of[id(value)] = len(self.known)
            self.known.append(value)
        return ["object", self.number_of[id(value)]]

    def resolve(self, reference: list[Any]) -> Any:
        kind, which = reference
        return getattr(builtins, which) if kind == "builtin" else self.known[which]

    def name(self, name: str) -> Any:
        if name not in self.module.__dict__:
            raise NameError(f"name {name!r} is not defined")
        return self.module.__dict__[name]

    def method(self, owner: Any, name: str, *arguments: Any) -> Any:
        found = getattr(owner, name, None)
        if found is None:
            raise TypeError(f"{type(owner).__name__} has no {name}")  # as len(), iter() and the like say it
        return found(*arguments)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What a question returns, and those of its arguments that the call changed in place."""
        arguments = [decode(value, self.resolve) for value in question["arguments"]]
        named = {key: decode(value, self.resolve) for key, value in question["named"].items()}
        value = encode(QUESTIONS[question["ask"]](self, *arguments, **named), self.refer)
        after = [encode(argument, self.refer) for argument in arguments]
        changed = [[i, new] for i, (new, old) in enumerate(zip(after, question["arguments"], strict=True)) if new != old]
        return {"value": value, "changed": changed}


QUESTIONS: dict[str, Callable[..., Any]] = {
    "name": Solution.name,
    "call": lambda _, function, *arguments, **named: function(*arguments, **named),
    "method": Solution.method,
    "attribute": lambda _, owner, name: getattr(owner, name),
    "assign": lambda _, owner, name, value: setattr(owner, name, value),
    "truth": lambda _, value: bool(value),
    "equal": lambda _, left, right: bool(left == right),
    "isinstance": lambda _, value, kind: isinstance(value, kind),
}


def failure(error: BaseException) -> dict[str, Any]:
    try:
        message = str.__str__(str(error))[:1000]
    except BaseException:  # it is the solution's own word too
        message = ""
    return {"error": [kind.__name__ for kind in type(error).__mro__], "message": message}


def flush() -> None:
    """Send off what was printed: this process is killed, not ended."""
    with contextlib.suppress(Exception):  # the solution may have closed or replaced it
        sys.stdout.flush()


def main() -> None:
    channel = Channel(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the solution's input is empty, and what it prints goes where its errors go
    os.dup2(2, 1)
    start = channel.receive()
    sys.path += start["packages"]
    set_limits(start["limits"], start["sandboxed"])
    sys.modules["solution"] = module = types.ModuleType("solution")
    try:
        exec(compile(start["source"], "solution.py", "exec", dont_inherit=True), module.__dict__)
        flush()
        channel.send({"value": None, "changed": []})
    except BaseException as error:
        import traceback  # it takes longer to load than most solutions to run

        traceback.print_exc()
        channel.send(failure(error))
        return
    solution = Solution(module)
    while True:
        question = channel.receive()
        try:
            answer = solution.answer(question)
        except BaseException as error:
            answer = failure(error)
        flush()
        channel.send(answer)


if __name__ == "__main__":
    try:
        main()
    except (EOFError, BrokenPipeError):  # the tester is done
        os._exit(0)
