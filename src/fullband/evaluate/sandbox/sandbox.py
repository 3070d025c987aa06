"""Run a solution's code against its tests, closed off from everything else, and say whether the tests ran to their end."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal, get_args

from fullband.evaluate.sandbox import bubblewrap, seccomp
from fullband.evaluate.sandbox.watch import use_below

Outcome = Literal["passed", "failed", "broken", "exited", "timeout", "memory", "processes", "output"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may use. Raises ValueError for a limit that lets nothing run.

    seconds    from start to verdict, on the clock; also of processor time for each process
    memory     bytes of address space of each process, and of memory in use by all together
    processes  processes and threads at a time
    disk       bytes of each of /tmp and /dev/shm, which vanish at the end; also of any one file
    output     bytes printed; more ends the run. The first 64 KiB are kept
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    processes: int = 32
    disk: int = 64 << 20
    output: int = 1 << 20

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"a time limit must be above 0 seconds, got {self.seconds}")
        if self.memory < 128 << 20:
            raise ValueError(f"a memory limit below {128 << 20} bytes leaves no room for Python; it is {self.memory}")
        if self.processes < 4 or self.disk < 4096 or self.output < 0:
            raise ValueError(f"limits: at least 4 processes, 4096 bytes of disk, 0 of output; not {self}")


@dataclass(frozen=True)
class Program:
    """Code a model wrote, and the tests that judge it.

    Tests see the solution's names, except those that hide a built-in; `overrides` are such names that the problem asks for (MBPP has a
    task to write `sum`). They pass it data, built-ins and its own objects.
    """

    solution: str
    tests: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class SandboxResult:
    """How a run ended.

    outcome  passed     the tests ran to their end
             failed     a test raised (an assertion, or an exception of the solution)
             broken     the solution could not be loaded
             exited     its process ended early, or sent what is no answer
             timeout, memory, processes, output: over that limit
    detail   one line: which test, which exception
    seconds  on the clock
    output   the first 64 KiB printed
    """

    outcome: Outcome
    detail: str
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


_KEPT_OUTPUT = 64 << 10
_TESTER = ("-S", "-s", "-P", "-B", "-m", f"{bubblewrap.INSIDE.name}.tester")
_STREAMS: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


class SandboxError(RuntimeError):
    """The sandbox failed, not the program in it."""


class Sandbox:
    """Runs programs under `limits`. Safe to use from several threads at a time.

    sandboxed=False runs them as ordinary processes of the user: code can then read and delete files, use the network and leave processes
    behind. The tests are out of the solution's reach all the same.
    Raises ValueError where there is no bubblewrap, or where it does not work; the message says what to do.
    """

    def __init__(self, limits: Limits | None = None, *, sandboxed: bool = True):
        self.limits = limits or Limits()
        self.sandboxed = sandboxed
        _check(sandboxed)

    def run(self, program: Program) -> SandboxResult:
        """Run one program. Every process it started has ended when this returns (unsandboxed: those that did not leave its group).

        Raises SandboxError if the sandbox itself fails.
        """
        return _run(program, self.limits, self.sandboxed)


def run_all(programs: Sequence[Program], sandbox: Sandbox, *, workers: int) -> list[SandboxResult]:
    """Results in the order of `programs`, several at a time. Time limits are by the clock: more workers than cores make slow programs
    time out. Raises ValueError for less than one worker; an interrupt ends it once the programs already running have ended."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(sandbox.run, programs))


@functools.cache
def _check(sandboxed: bool) -> None:
    """Once in a process: does it work here?"""
    if sandboxed:
        bubblewrap.bubblewrap()
    try:
        result = _run(Program("def answer():\n    return 42\n", "assert answer() == 42\n"), Limits(seconds=60), sandboxed)
    except SandboxError as error:
        raise ValueError(f"the sandbox does not work here: {error}") from None
    if not result.passed:
        raise ValueError(f"the sandbox does not work here: {result.outcome}: {result.detail} {result.output.strip()[-300:]}")


def _run(program: Program, limits: Limits, sandboxed: bool) -> SandboxResult:
    started = time.monotonic()
    start = _start_sandboxed if sandboxed else _start_unsandboxed
    with start(asdict(program) | {"limits": asdict(limits), "sandboxed": sandboxed}, limits) as running:
        outcome, detail = running.verdict(limits.seconds)
    return SandboxResult(outcome, detail, time.monotonic() - started, running.output())


@contextlib.contextmanager
def _start_sandboxed(job: dict[str, Any], limits: Limits) -> Iterator[_Running]:
    users, python = bubblewrap.users(), bubblewrap.interpreter()
    job |= {"users": users, "packages": python.packages}
    with _pipe() as (filter_read, filter_write), _pipe() as (info_read, info_write):
        filter_write.write(seccomp.program())
        filter_write.close()
        passed = filter_read.fileno(), info_write.fileno()
        command = bubblewrap.command(disk=limits.disk, as_root=users is not None, filter_fd=passed[0], info_fd=passed[1])
        process = subprocess.Popen([*command, python.program, *_TESTER], pass_fds=passed, **_STREAMS)
        info_write.close()
        first = _first_process(info_read)
        with _Running(process, job, limits.output, lambda: _kill_sandbox(process, first)) as running:
            if first is not None:
                threading.Thread(target=running.watch, args=(first, limits), daemon=True).start()
            yield running


@contextlib.contextmanager
def _start_unsandboxed(job: dict[str, Any], limits: Limits) -> Iterator[_Running]:
    job |= {"users": None, "packages": list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))}
    with tempfile.TemporaryDirectory(prefix="fullband-", ignore_cleanup_errors=True) as folder:
        environment = bubblewrap.environment(str(bubblewrap.INSIDE.parent), folder)
        environment |= {"SYSTEMROOT": os.environ["SYSTEMROOT"]} if os.name == "nt" else {}
        process = subprocess.Popen([sys.executable, *_TESTER], cwd=folder, env=environment, start_new_session=True, **_STREAMS)
        with _Running(process, job, limits.output, lambda: _kill_group(process)) as running:
            yield running


class _Running:
    """A tester that runs, the threads that read what it and the solution write, and how to end them all."""

    def __init__(self, process: subprocess.Popen[bytes], job: dict[str, Any], most_output: int, kill: Callable[[], None]):
        self.process, self.kill, self.most_output = process, kill, most_output
        self.printed, self.printed_bytes, self.report = bytearray(), 0, b""
        self.seen: tuple[Outcome, str] | None = None  # a limit passed, as seen from out here
        self.done = threading.Event()
        self.job = json.dumps(job).encode() + b"\n"
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._read_output, self._read_report)]

    def __enter__(self) -> _Running:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join(timeout=1)  # unsandboxed, a process that got away may hold the pipes
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def verdict(self, seconds: float) -> tuple[Outcome, str]:
        """Wait for the tester's word, no longer than `seconds`. Raises SandboxError if the tester did not get as far as the solution: what
        ends it later, the solution may have brought about."""
        if not self.done.wait(seconds):
            return "timeout", f"not finished after {seconds:g} s"
        if self.printed_bytes > self.most_output:
            return "output", f"more than {self.most_output} bytes printed"
        if self.seen:
            return self.seen
        ready, _, word = self.report.partition(b"\n")
        try:
            said = json.loads(word)
            outcome, detail = said["outcome"], said["detail"]
        except (ValueError, KeyError, TypeError):
            if ready == b"ready":
                return "exited", "the tests' process ended without a verdict"
            self.threads[1].join(timeout=1)
            raise SandboxError(self.output().strip()[-500:] or f"no verdict, exit status {self.process.poll()}") from None
        if outcome not in get_args(Outcome):
            raise SandboxError(f"{outcome}: {detail}")
        return outcome, _printable(detail)

    def watch(self, first: int, limits: Limits) -> None:
        """Ends the run once all processes inside together use too much memory or are too many, or once they can't be counted."""
        while not self.done.wait(0.02):
            try:
                memory, processes = use_below(first)
            except (OSError, ValueError, IndexError) as error:
                if self.done.wait(1):  # the run has ended, and with it what was counted
                    return
                self.seen = "exited", f"what it uses can't be counted ({error})"
            else:
                if memory > limits.memory:
                    self.seen = "memory", f"more than {limits.memory >> 20} MiB of memory"
                elif processes > limits.processes:
                    self.seen = "processes", f"more than {limits.processes} processes"
            if self.seen:
                self.done.set()
                return

    def output(self) -> str:
        return self.printed.decode("utf-8", errors="replace")

    def _send(self) -> None:
        """The job; the pipe stays open after it, so that the tester sees the host's end by its closing."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.write(self.job)
            self.process.stdin.flush()

    def _read_output(self) -> None:
        for chunk in _chunks(self.process.stderr):
            self.printed += chunk[: _KEPT_OUTPUT - len(self.printed)]
            self.printed_bytes += len(chunk)
            if self.printed_bytes > self.most_output:
                self.done.set()
                return

    def _read_report(self) -> None:
        for chunk in _chunks(self.process.stdout):
            self.report += chunk
            if self.report.count(b"\n") > 1:
                break
        self.done.set()


def _chunks(pipe: IO[bytes] | None) -> Iterator[bytes]:
    assert pipe
    with pipe:
        while chunk := os.read(pipe.fileno(), 1 << 16):
            yield chunk


def _printable(words: str) -> str:
    """Without line ends, terminal sequences and half characters: they are the solution's, and go into files and onto screens."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    reading, writing = os.pipe()
    with open(reading, "rb") as read, open(writing, "wb", buffering=0) as write:
        yield read, write


def _first_process(info: IO[bytes]) -> int | None:
    """The sandbox's process 1, as numbered out here; None if bubblewrap failed before it had one."""
    try:
        return int(json.loads(info.read())["child-pid"])
    except (ValueError, KeyError):
        return None


def _kill_sandbox(process: subprocess.Popen[bytes], first: int | None) -> None:
    """End process 1, and with it all others inside: bubblewrap, its parent, ends once the kernel has cleared them away."""
    if first is None:
        process.kill()
    elif process.poll() is None:  # then bubblewrap has not waited for its child, so the number is still the child's
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if os.name == "nt":
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone
        os.killpg(process.pid, signal.SIGKILL)
