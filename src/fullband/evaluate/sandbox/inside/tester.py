"""The process that holds the tests. It runs them against a solution it can only ask, and tells the host how that ended.

In the sandbox it is process 1, so the kernel lets no other process in there stop it, and ends them all when it ends.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from .confine import become, die_first, hide_memory, set_limits
from .wire import Channel, decode, encode

MOST_FILES = 10_000


class Gone(BaseException):
    """The solution's process ended, or sends what is no answer."""


def _asking(name: str) -> Callable[..., Any]:
    """A method that has the solution's object call its own."""
    return lambda remote, *arguments: remote._link.ask("method", remote, name, *arguments)


class Remote:
    """An object of the solution that is no plain data. It equals nothing but other objects of the solution, and can't be ordered or
    reckoned with: the solution could answer such questions as it likes."""

    def __init__(self, link: Link, number: int):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._link.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("assign", self, name, value)

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Remote):
            return self is other
        return self._link.ask("equal", self, other) is True

    def __hash__(self) -> int:
        return hash(self._number)

    def __bool__(self) -> bool:
        return self._link.ask("truth", self) is True

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._link.ask("isinstance", value, self) is True

    def __repr__(self) -> str:
        return "<an object of the solution>"

    def __contains__(self, value: Any) -> bool:
        return self._link.ask("method", self, "__contains__", value) is True

    __str__, __len__, __iter__, __next__ = (_asking(name) for name in ("__str__", "__len__", "__iter__", "__next__"))
    __getitem__, __setitem__, __delitem__ = (_asking(name) for name in ("__getitem__", "__setitem__", "__delitem__"))


class Link:
    """Questions to the solution's process."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.objects: dict[int, Remote] = {}
        self.gone: Gone | None = None  # kept, so that a test that swallows every exception does not pass

    def ask(self, what: str, *arguments: Any, **named: Any) -> Any:
        """What the solution answers. Raises the built-in exception nearest to the one the solution raised; Gone if it can't answer."""
        sent = [encode(value, self._refer) for value in arguments]
        question = {"ask": what, "arguments": sent, "named": {key: encode(value, self._refer) for key, value in named.items()}}
        answer = self.exchange(question)
        try:
            value = decode(answer["value"], self._resolve)
            changed = [(arguments[i], decode(new, self._resolve)) for i, new in answer["changed"]]
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise self._gone(f"the solution's process sent what is no answer ({error})") from None
        for argument, new in changed:
            _put_into(argument, new)
        return value

    def exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self.channel.send(message)
            answer = self.channel.receive()
        except (EOFError, OSError):
            raise self._gone("the solution's process ended before the tests did") from None
        except (ValueError, RecursionError) as error:
            raise self._gone(f"the solution's process sent what is no answer ({error})") from None
        if "error" in answer:
            raise nearest(answer) or self._gone(f"the solution raised {next(iter(answer['error']), None)}")
        return answer

    def _gone(self, why: str) -> Gone:
        self.gone = Gone(why)
        return self.gone

    def _refer(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["object", value._number]
        raise TypeError(f"tests pass data and the solution's own objects to it, not {type(value).__name__}")

    def _resolve(self, reference: list[Any]) -> Any:
        kind, which = reference
        if kind == "module" and which in sys.stdlib_module_names:
            return importlib.import_module(which)
        if kind == "builtin" and isinstance(builtin := getattr(builtins, which), (type, type(Ellipsis))):
            return builtin
        if kind != "object" or not isinstance(which, int):
            raise ValueError(f"unknown kind {kind!r}")
        return self.objects.setdefault(which, Remote(self, which))


def _put_into(container: Any, new: Any) -> None:
    """Make a mutable container that the tests passed what the call made of it."""
    if isinstance(container, (list, bytearray, set, dict, deque)):
        container.clear()
        (container.update if isinstance(container, (set, dict)) else container.extend)(new)


def nearest(answer: dict[str, Any]) -> Exception | None:
    """The built-in exception to raise for one that the solution raised, so that `except ValueError` in a test still works. None for those
    that end a program, such as SystemExit."""
    names, message = answer.get("error"), str(answer.get("message"))
    for name in names if isinstance(names, list) else []:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(message)
            except TypeError:  # wants more than a message
                continue
    return None


class Names(dict[str, Any]):
    """Globals of the tests: what they define, then built-ins, then the solution's own names. So these can't hide either of those,
    except for the built-ins that the problem asks the solution to write anew."""

    def __init__(self, link: Link, overrides: list[str]):
        super().__init__(__name__="tests", __builtins__=builtins)
        self.link, self.overrides = link, overrides

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and name not in self.overrides:
            raise KeyError(name)
        value = self.link.ask("name", name)
        if isinstance(value, type(sys)) and value.__name__ != name:
            raise NameError(f"{name} is the module {value.__name__}: import it in the tests")
        return value


def verdict(job: dict[str, Any], channel: Channel) -> tuple[str, str]:
    """Outcome and detail of a job: the tests passed only if they ran to their end."""
    link = Link(channel)
    start = {key: job[key] for key in ("packages", "limits", "sandboxed")} | {"source": job["solution"]}
    try:
        link.exchange(start)
    except Gone as gone:
        return "exited", str(gone)
    except MemoryError:
        return "memory", "the solution ran out of memory while it was loaded"
    except Exception as error:
        return "broken", f"loading the solution: {_described(error)}"
    names = Names(link, job["overrides"])
    try:
        exec(compile(job["tests"], "tests.py", "exec", dont_inherit=True), names)
    except Gone as gone:
        return "exited", str(gone)
    except MemoryError:
        return "memory", "out of memory"
    except BaseException as error:
        return "failed", _where(error, job["tests"]) + _described(error)
    return ("exited", str(link.gone)) if link.gone else ("passed", "")


def _described(error: BaseException) -> str:
    """Its words may be an object of the solution (`assert x == y, x`), which then says them, or raises."""
    try:
        words = str(error)
    except BaseException:
        words = ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _where(error: BaseException, tests: str) -> str:
    """The line of the tests at which an exception came up."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "tests.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    lines = tests.splitlines()
    return f"tests line {line}: {lines[line - 1].strip()[:300]}: " if 0 < line <= len(lines) else ""


def watch_files(report: int) -> NoReturn:
    """Ends everything once there are too many files: an empty one takes no disk, but the kernel's memory."""
    while True:
        for folder in ("/tmp", "/dev/shm"):
            about = os.statvfs(folder)
            if about.f_files - about.f_ffree > MOST_FILES:
                tell(report, "memory", f"more than {MOST_FILES} files in {folder}")
        time.sleep(0.02)


def end_with_the_host() -> NoReturn:
    """The host keeps this process's input open for as long as it lives. (A signal at its death would be refused: this is another user.)"""
    os.read(0, 1)
    os._exit(1)


def tell(report: int, outcome: str, detail: str) -> NoReturn:
    """Send the verdict and end. The threads left, and in the sandbox all processes, end with it."""
    with contextlib.suppress(Exception):  # a test may have closed it
        sys.stdout.flush()
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(report, json.dumps({"outcome": outcome, "detail": detail[:2000]}).encode() + b"\n")
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's handler is one that others inside may call
    report = os.dup(1)
    os.dup2(2, 1)  # what tests print is output, not a verdict
    die_first()
    job = json.loads(sys.stdin.buffer.readline())
    own_user, solution_user = job["users"] or (None, None)
    command = [sys.executable, "-S", "-s", "-P", "-B", "-m", f"{__package__}.solution"]
    identity = {} if solution_user is None else dict(user=solution_user, group=solution_user, extra_groups=[])
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **identity)
    assert process.stdin and process.stdout
    if own_user is not None:
        become(own_user)
    hide_memory()
    set_limits(job["limits"], job["sandboxed"])
    threading.Thread(target=end_with_the_host, daemon=True).start()
    if job["sandboxed"]:
        threading.Thread(target=watch_files, args=(report,), daemon=True).start()
    os.write(report, b"ready\n")  # the solution waits for its source until now: what goes wrong from here on is a verdict
    try:
        outcome, detail = verdict(job, Channel(process.stdout.fileno(), process.stdin.fileno()))
        if outcome == "exited" and (number := _signal_of(process)):
            detail = f"{detail} (killed by signal {number})"
    except BaseException as error:
        outcome, detail = "exited", f"the tests' process was disturbed ({_described(error)})"
    tell(report, outcome, detail)


def _signal_of(process: subprocess.Popen[bytes]) -> int:
    try:
        return max(0, -process.wait(timeout=1))
    except subprocess.TimeoutExpired:
        return 0


if __name__ == "__main__":
    main()
