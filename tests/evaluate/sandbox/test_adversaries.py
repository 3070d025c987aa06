"""Hostile programs: none passes, none harms. The controls show that the attempts would work where nothing stops them."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fullband.evaluate.sandbox import Program, Sandbox
from hostile.programs import ADVERSARIES, SOLVED, TESTS

SHORT = 2.0  # seconds; machines are slow at times, so only those that never end get so few
FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/", "/usr", str(Path.home()))


@pytest.fixture(scope="module")
def surroundings() -> Iterator[dict[str, object]]:
    """Things to reach: a file in the home folder, a server on this machine; and a name to leave files under."""
    with tempfile.NamedTemporaryFile(dir=Path.home(), prefix=".fullband-test-") as file, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(file.name, 0o644)
        yield {"home": file.name, "port": server.getsockname()[1], "mark": f"fullband-{secrets.token_hex(8)}"}


def test_there_are_enough():
    assert len(ADVERSARIES) >= 25


def test_a_solution_passes_the_tests_they_face(sandbox):
    assert sandbox.run(Program(SOLVED, TESTS)).passed


@pytest.mark.parametrize("name", ADVERSARIES)
def test_never_passes_and_never_harms(name, sandbox, surroundings, left_behind, monkeypatch):
    monkeypatch.setenv("FULLBAND_SECRET", "known")
    outcomes, source = ADVERSARIES[name]
    limited = sandbox
    if "timeout" in outcomes.split():
        limited = Sandbox(replace(sandbox.limits, seconds=SHORT))
    result = limited.run(Program(source.format(**surroundings), TESTS))
    assert result.outcome in outcomes.split(), result
    assert result.seconds < limited.limits.seconds + 3
    assert left_behind() == []
    assert not [folder for folder in FOLDERS if Path(folder, str(surroundings["mark"])).exists()]
    assert os.environ["FULLBAND_SECRET"] == "known"


@pytest.mark.parametrize("name", ["network", "home folder read", "home folder listed", "password file", "processes of the host"])
def test_the_attempts_work_outside(name, surroundings):
    """Harmless ones only."""
    result = Sandbox(sandboxed=False).run(Program(ADVERSARIES[name][1].format(**surroundings), TESTS))
    assert result.passed, result


@pytest.mark.parametrize(
    "name",
    [
        "os._exit(0) when called", "writes a verdict to every file", "patched assert", "patched built-ins", "equal to everything",
        "looks through frames and objects", "answers before it is asked", "reckons as it likes",
    ],
)  # fmt: skip
def test_tests_are_out_of_reach_without_a_sandbox_too(name, surroundings):
    assert not Sandbox(sandboxed=False).run(Program(ADVERSARIES[name][1].format(**surroundings), TESTS)).passed
