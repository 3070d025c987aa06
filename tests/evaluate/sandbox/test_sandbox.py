# ruff: noqa: E501  # programs are a line each
"""The sandbox: what passes, what each outcome means, values across the wire, limits, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import fullband.evaluate.sandbox.bubblewrap as bubblewrap
import fullband.evaluate.sandbox.sandbox as sandbox_module
from fullband.evaluate.sandbox import Limits, Program, Sandbox, run_all, seccomp, watch


def outcome(sandbox, solution, tests, overrides=()):
    result = sandbox.run(Program(solution, tests, overrides))
    return result.outcome, result.detail


@pytest.mark.parametrize(
    ("solution", "tests", "expected"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2", ("passed", "")),
        ("def f(x): return x", "\nassert f(1) == 2", ("failed", "tests line 2: assert f(1) == 2: AssertionError")),
        ("def f(x): return 1 / x", "f(0)", ("failed", "tests line 1: f(0): ZeroDivisionError: division by zero")),
        ("def f(:", "f(0)", ("broken", "loading the solution: SyntaxError: invalid syntax (solution.py, line 1)")),
        ("1 / 0", "pass", ("broken", "loading the solution: ZeroDivisionError: division by zero")),
        ("", "f(0)", ("failed", "tests line 1: f(0): NameError: name 'f' is not defined")),
        ("import os; os._exit(3)", "pass", ("exited", "the solution's process ended before the tests did")),
        (
            "import os; os.kill(os.getpid(), 9)",
            "pass",
            ("exited", "the solution's process ended before the tests did (killed by signal 9)"),
        ),
        ("def f(x): return x", "assert f(", ("failed", "SyntaxError: '(' was never closed (tests.py, line 1)")),
    ],
)
def test_outcomes(sandbox, solution, tests, expected):
    assert outcome(sandbox, solution, tests) == expected


VALUES = [
    "None", "True", "-1", "2**70", "-(2**64)", "10**5000", "1.5", "float('inf')", "1e-320", "1 + 2j", "'text \\ud800 ☃'", "b'bytes'",
    "bytearray(b'x')", "[1, [2, (3, {4})]]", "(1,)", "()", "set()", "frozenset({1, 2})", "{'a': [1], 2: None, (1, 2): {}}", "range(1, 9, 3)",
    "collections.deque([1, 2])", "collections.Counter('aab')", "collections.OrderedDict(a=1)", "fractions.Fraction(1, 3)",
    "decimal.Decimal('0.10')", "datetime.date(2020, 1, 2)", "datetime.datetime(2020, 1, 2, 3, 4, 5, 6)", "datetime.time(1, 2)",
    "datetime.timedelta(1, 2, 3)", "int", "ValueError", "...",
]  # fmt: skip


def test_data_crosses_both_ways_as_it_is(sandbox):
    header = "import collections, fractions, decimal, datetime\n"
    tests = [f"x = {value}\ny = f(x)\nassert y == x and type(y) is type(x), (x, y)\nassert g(x), x" for value in VALUES]
    solution = f"{header}import itertools\nexpected = iter([{', '.join(VALUES)}])\ndef f(x): return x\ndef g(x): return x == next(expected)"
    assert outcome(sandbox, solution, header + "\n".join(tests)) == ("passed", "")


@pytest.mark.parametrize(
    ("solution", "tests"),
    [
        ("import collections\nP = collections.namedtuple('P', 'x y')\ndef f(): return P(1, 2)", "assert f() == (1, 2) and f().y == 2"),
        ("import collections\ndef f():\n d = collections.defaultdict(list)\n d[1].append(2)\n return d", "assert f() == {1: [2]}"),
        ("class L(list): pass\ndef f(): return L([1])", "assert f() == [1]"),
        ("import enum\nclass E(enum.IntEnum):\n A = 3\ndef f(): return E.A", "assert f() == 3"),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0"),
        ("def f(): return map(str, [1])", "assert list(f()) == ['1']"),
        ("def f(): return {1: 2}.items()", "assert len(f()) == 1 and sorted(f()) == [(1, 2)]"),
        ("def f(x): x.append(1); x.sort()", "a = [3, 2]\nf(a)\nassert a == [1, 2, 3]"),
        ("def f(d): d.clear(); d['k'] = [1]", "d = {'a': 1}\nf(d)\nassert d == {'k': [1]}"),
        ("class N:\n def __init__(self, v): self.v, self.next = v, None\ndef f(n): return n.v + n.next.v", "a = N(1)\na.next = N(2)\nassert f(a) == 3"),
        ("class N: pass\ndef f(): return N()", "assert isinstance(f(), N) and not isinstance(f(), int) and f() != f()"),
        ("class P:\n def __init__(s, v): s.v = v\n def __eq__(s, o): return s.v == o.v\n def __str__(s): return 'P'\n"
         " def __getitem__(s, i): return s.v[i]\n def __contains__(s, x): return x in s.v", "p = P([1])\nassert p == P([1]) and p != P([2])\n"
         "assert str(p) == 'P' and p[0] == 1 and 1 in p and 2 not in p"),
        ("def f(x):\n if x < 0: raise ValueError('low')\n return x", "try: f(-1)\nexcept ValueError as e: assert str(e) == 'low'\nelse: assert 0"),
        ("class E(KeyError): pass\ndef f(): raise E('k')", "try: f()\nexcept KeyError: pass\nelse: assert 0"),
        ("def outer(a):\n def inner(b): return a + b\n return inner", "assert outer(1)(2) == 3"),
        ("def f(kind, *a, key=None): return kind(a), key", "assert f(list, 1, key='k') == ([1], 'k')"),
        ("import math", "assert math.sqrt(4) == 2"),
        ("from dataclasses import dataclass\n@dataclass\nclass D:\n x: int", "assert D(3).x == 3 and D(3) == D(3)"),
        ("import pickle, multiprocessing\ndef g(x): return x * x\ndef f(): return pickle.loads(pickle.dumps(g))(3)", "assert f() == 9"),
        ("if __name__ == '__main__': 1 / 0\ndef f(): return 1", "assert f() == 1"),
        ("import tempfile, os\ndef f():\n with tempfile.NamedTemporaryFile('w+') as t:\n  t.write('x'); t.flush()\n  return open(t.name).read()",
         "assert f() == 'x'"),
        ("import threading\ndef f():\n out = []\n t = threading.Thread(target=out.append, args=(1,)); t.start(); t.join()\n return out", "assert f() == [1]"),
        ("import subprocess, sys\ndef f(): return subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout", "assert f() == 'hi\\n'"),
        ("def f(): return input()", "try: f()\nexcept EOFError: pass\nelse: assert 0"),
        ("import numpy as np\ndef f(x): return np.mean(x)\ndef g(): return np.int64(3), np.bool_(True)", "assert f([1, 2]) == 1.5 and g() == (3, True)"),
    ],
)  # fmt: skip
def test_what_solutions_do_works(sandbox, solution, tests):
    assert outcome(sandbox, solution, tests) == ("passed", "")


def test_names_of_the_tests_and_built_ins_win(sandbox):
    assert (
        outcome(sandbox, "limit = 1\nlen = 3\ndef f(): return 7", "limit = 2\nassert limit == 2 and len('ab') == 2 and f() == 7")[0]
        == "passed"
    )
    assert outcome(sandbox, "def sum(a, b): return a - b", "assert sum(3, 1) == 2", ("sum",))[0] == "passed"


def test_a_swallowed_end_is_still_an_end(sandbox):
    tests = "try: f()\nexcept BaseException: pass\ntry: f()\nexcept: pass"
    assert outcome(sandbox, "import os\ndef f(): os._exit(0)", tests)[0] == "exited"


def test_output_is_kept_up_to_a_limit(sandbox):
    result = sandbox.run(Program("print('hello')\ndef f(): print('from f')", "f()\nprint('from the tests')"))
    assert result.passed and result.output == "hello\nfrom f\nfrom the tests\n"
    flooded = sandbox.run(Program("while True: print('x' * 99)", ""))
    assert flooded.outcome == "output" and len(flooded.output) == 64 << 10


def test_same_verdict_each_time(sandbox):
    """Hashes of strings have no random seed."""
    tests = "assert list({'a', 'b', 'c', 'd'}) == f() and hash('a') == g()"
    assert outcome(sandbox, "def f(): return list({'a', 'b', 'c', 'd'})\ndef g(): return hash('a')", tests)[0] == "passed"


def test_time_ends_what_the_tests_themselves_do(sandbox):
    started = time.monotonic()
    assert Sandbox(Limits(seconds=1)).run(Program("", "while True: pass")).outcome == "timeout"
    assert time.monotonic() - started < 6


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="compares root's way with other users'")
@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("def f(): return 1", "passed"),
        ("def f(): return 2", "failed"),
        ("open('/proc/1/mem', 'rb')\ndef f(): return 1", "broken"),
        ("import os\nos.open('/proc/1/fd/1', os.O_WRONLY)\ndef f(): return 1", "broken"),
        ("import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0\ndef f(): return 1", "broken"),
        ("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\ndef f(): return 1", "broken"),
        ("import os, signal\nos.kill(1, signal.SIGKILL)\ndef f(): return 2", "failed"),
        ("open('/x', 'w')\ndef f(): return 1", "broken"),
        ("open('/dev/x', 'w')\ndef f(): return 1", "broken"),
        ("x = bytearray(1 << 30)", "memory"),
        ("for n in range(100): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))", "broken"),
        (
            "import os, time\nfor _ in range(15):\n if os.fork() == 0:\n  time.sleep(60)\ndef f(): return 1\ntime.sleep(60)",
            "processes",
        ),
    ],
)
def test_a_user_namespace_holds_as_well(sandbox, monkeypatch, solution, expected):
    """What everybody but root gets. (Its limit of processes is the tester's count here, since the kernel does not limit root's.)"""
    monkeypatch.setattr(bubblewrap, "users", lambda: None)
    assert outcome(sandbox, solution, "assert f() == 1")[0] == expected


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("class A:\n def __str__(s): raise SystemExit\n __repr__ = __str__\n def __eq__(s, o): raise KeyboardInterrupt\ndef f(): return A()", "failed"),
        ("class A:\n def __str__(s): return 1\ndef f(): return A()", "failed"),
        ("class A:\n def __str__(s): import os; os._exit(0)\ndef f(): return A()", "failed exited"),
    ],
)  # fmt: skip
def test_what_a_failed_test_says_may_be_the_solutions_word(sandbox, solution, expected):
    assert outcome(sandbox, solution, "x = f()\nassert x == 1, x")[0] in expected.split()


def test_a_disturbed_tester_is_a_verdict(sandbox):
    """Whatever ends it after the solution was started: here the tests themselves, as a hole in the sandbox would."""
    assert outcome(sandbox, "", "import os\nos._exit(3)") == ("exited", "the tests' process ended without a verdict")
    assert outcome(sandbox, "", "import os\nos.closerange(0, 64)\nf()")[0] == "exited"


def test_memory_is_counted_while_the_tests_hold_the_interpreter(sandbox):
    solution = "import os, time\nfor _ in range(4):\n if os.fork() == 0:\n  time.sleep(0.3)\n  x = bytearray(120 << 20)\n  time.sleep(60)\ndef f(): return 1"
    assert outcome(sandbox, solution, "import re\nf()\nre.match('(a|a)*b', 'a' * 60)")[0] == "memory"


def test_what_cannot_be_counted_ends_the_run(sandbox, monkeypatch):
    def refuse(first):
        raise PermissionError(1, "no /proc")

    monkeypatch.setattr(sandbox_module, "use_below", refuse)
    assert outcome(sandbox, "import time\ntime.sleep(60)", "")[0] == "exited"


def test_memory_is_resident_and_swapped_of_any_thread_that_lives(tmp_path, monkeypatch):
    """Process 7 runs; of process 8 the first thread has ended, which then shows no memory; 9 is not below 1."""
    statuses = {
        "7/task/7": "VmRSS:\t 8 kB\nVmSwap:\t 4 kB\n",
        "8/task/8": "State: Z\n",
        "8/task/10": "VmRSS:\t 16 kB\n",
        "9/task/9": "VmRSS:\t 1 kB\n",
    }
    for place, status in statuses.items():
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "status").write_text(status)
    for process, parent in ((1, 0), (7, 1), (8, 7), (9, 0)):
        (tmp_path / str(process)).mkdir(exist_ok=True)
        (tmp_path / str(process) / "stat").write_text(f"{process} (a) b) S {parent} 0")
    monkeypatch.setattr(watch, "PROC", str(tmp_path))
    assert watch.use_below(1) == (28 << 10, 2)


def test_what_a_solution_says_can_be_shown_and_kept(sandbox):
    result = sandbox.run(Program("def f(): raise ValueError('\\ud800\\x1b[2J\\nfine: ü')", "f()"))
    assert result.detail == r"tests line 1: f(): ValueError: \ud800\x1b[2J\nfine: ü"


def test_the_sandbox_runs_this_python(sandbox):
    """Not the library of another one of the same name."""
    assert outcome(sandbox, "import sys\ndef f(): return sys.version", f"assert f() == {sys.version!r}") == ("passed", "")
    assert outcome(sandbox, "from multiprocessing import Value\ndef f(): return Value('i', 3).value", "assert f() == 3") == ("passed", "")


def test_a_machine_out_of_memory_ends_the_solution_first(sandbox):
    assert outcome(sandbox, "def f(): return open('/proc/self/oom_score_adj').read()", "assert f() == '1000\\n'") == ("passed", "")


AS_ANOTHER_USER = """
import json, sys
from fullband.evaluate.sandbox import Limits, Program, Sandbox
sandbox = Sandbox(Limits(seconds=10, memory=256 << 20, processes=12, disk=4 << 20, output=64 << 10))
print(json.dumps([sandbox.run(Program(solution, "assert f(2) == 4\\nassert f(3) == 9")).outcome for solution in json.load(sys.stdin)]))
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user; others are one already")
def test_as_another_user(sandbox, tmp_path_factory):
    """The whole pool as a user who owns nothing: solution and tester are then the same user."""
    python = "/usr/bin/python3"  # this test's own may lie in root's home
    found = (
        subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True)
        if os.path.exists(python)
        else None
    )
    if found is None or found.stdout.strip() != "True":
        pytest.skip("the system has no Python 3.11 that every user may run")
    expected = {
        "def f(x): return x * x": "passed",
        "import os, signal\nfor _ in range(99): os.kill(1, signal.SIGINT)\ndef f(x): return 4": "failed",
        "import os, signal\nos.kill(1, signal.SIGKILL)\ndef f(x): return 4": "failed",
        "import resource\nresource.prlimit(1, resource.RLIMIT_AS, (0, 0))\ndef f(x): return x * x": "broken",
        "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))\ndef f(x): return x * x": "broken",
        "open('/proc/1/mem', 'rb')\ndef f(x): return x * x": "broken",
        "import os, time\nfor _ in range(4):\n if os.fork() == 0:\n  x = bytearray(120 << 20)\n  time.sleep(60)\ntime.sleep(60)": "memory",
    }
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        package = Path(folder, "fullband", "evaluate")
        shutil.copytree(Path(sandbox_module.__file__).parent, package / "sandbox")
        (package / "__init__.py").touch()
        (package.parent / "__init__.py").touch()
        for path in [Path(folder), *Path(folder).rglob("*")]:
            path.chmod(0o755)
        done = subprocess.run(
            [python, "-c", AS_ANOTHER_USER], input=json.dumps(list(expected)), capture_output=True, text=True, cwd="/",
            env={"PYTHONPATH": folder, "PATH": "/usr/bin:/bin"}, user=65534, group=65534, extra_groups=[],
        )  # fmt: skip
    if "does not work here" in done.stderr:
        pytest.skip(f"this machine gives other users no namespaces: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert dict(zip(expected, json.loads(done.stdout), strict=True)) == expected


def test_many_at_a_time_in_their_order(sandbox):
    programs = [Program(f"def f(): return {i}", f"assert f() == {i if i % 3 else -1}") for i in range(12)]
    results = run_all(programs, sandbox, workers=3)
    assert [result.passed for result in results] == [i % 3 != 0 for i in range(12)]


def test_an_interrupt_ends_the_pool(sandbox, monkeypatch):
    started: list[Program] = []

    def interrupted(program):
        started.append(program)
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all([Program("", "")] * 200, sandbox, workers=2)
    assert len(started) < 20


def test_the_host_dying_ends_the_sandbox(sandbox):
    """Killed mid-run, it leaves no process behind."""
    host = "from fullband.evaluate.sandbox import *\nSandbox(Limits(seconds=500)).run(Program('import time\\ntime.sleep(1000)', ''))"
    process = subprocess.Popen([sys.executable, "-c", host])
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # bubblewrap, the tester, the solution, and that it has got to its sleep
            children = descendants(process.pid)
            if len(children) == 3 and sleeping(children[-1]):
                break
            time.sleep(0.1)
        assert len(children) == 3
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while (alive := [child for child in children if state(child) not in ("", "Z")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == []


def state(process: int) -> str:
    """Its letter in /proc; nothing if it is gone."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def sleeping(process: int) -> bool:
    """In clock_nanosleep, by the kernel's own word."""
    try:
        with open(f"/proc/{process}/syscall") as file:
            return file.read().split()[0] in ("230", "115")  # x86_64, aarch64
    except OSError:
        return False


def descendants(ancestor: int) -> list[int]:
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [ancestor]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found[1:]


def test_unsandboxed_must_be_asked_for_and_needs_no_bubblewrap(monkeypatch):
    sandbox_module._check.cache_clear()
    monkeypatch.setattr(bubblewrap, "bubblewrap", missing)
    with pytest.raises(ValueError, match=r"apt install bubblewrap.*dnf install bubblewrap"):
        Sandbox()
    free = Sandbox(Limits(seconds=30), sandboxed=False)
    assert free.run(Program("import os\ndef f(): return os.getcwd()", "import os\nassert f() == os.getcwd()")).passed
    assert free.run(Program("import os\nos._exit(0)", "")).outcome == "exited"
    assert Sandbox(Limits(seconds=1), sandboxed=False).run(Program("while True: pass", "")).outcome == "timeout"


def missing() -> str:
    raise ValueError(f"running a model's code needs a sandbox: {bubblewrap.HINT}")


def test_missing_bubblewrap_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(ValueError, match=r"needs a sandbox: install bubblewrap \(Debian, Ubuntu: apt install bubblewrap") as error:
        bubblewrap.bubblewrap.__wrapped__()
    assert "\n" not in str(error.value)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="needs Linux"):
        bubblewrap.bubblewrap.__wrapped__()


def test_a_sandbox_that_does_not_work_says_so(sandbox, monkeypatch):
    sandbox_module._check.cache_clear()
    command = bubblewrap.command
    monkeypatch.setattr(bubblewrap, "command", lambda **options: [*command(**options)[:-1], "--no-such-option", "--"])
    with pytest.raises(ValueError, match=r"does not work here.*no-such-option"):
        Sandbox()


def test_the_filter_knows_its_machines():
    for machine in ("x86_64", "aarch64"):
        steps = seccomp.program(machine)
        assert len(steps) % 8 == 0 and len(steps) < 4096 * 8
    with pytest.raises(ValueError, match="not riscv64"):
        seccomp.program("riscv64")


@pytest.mark.parametrize(
    "wrong", [dict(seconds=0), dict(seconds=float("nan")), dict(memory=1), dict(processes=1), dict(disk=0), dict(output=-1)]
)
def test_limits_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match="limit"):
        Limits(**wrong)


def test_no_workers(sandbox):
    with pytest.raises(ValueError, match="workers must be at least 1"):
        run_all([], sandbox, workers=0)


def test_programs_inside_need_only_the_standard_library():
    code = (
        "import sys, inside.tester, inside.solution\n"
        "print([m for m in sys.modules if m.partition('.')[0] not in sys.stdlib_module_names | {'inside', '__main__'}])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(bubblewrap.INSIDE.parent)}
    )
    assert done.stdout.strip() == "[]"
