"""A working sandbox, or a skip with a reason; under FULLBAND_CI=1 a failure, so that nobody believes these tests ran."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import fullband.evaluate.sandbox.sandbox as sandbox_module
from fullband.evaluate.sandbox import Limits, Sandbox

TIGHT = Limits(seconds=20, memory=256 << 20, processes=12, disk=4 << 20, output=64 << 10)


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    try:
        return Sandbox(TIGHT)
    except ValueError as error:
        if os.environ.get("FULLBAND_CI") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def left_behind(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Command lines of processes that still live in a process namespace which a sandbox of this test made."""
    namespaces: set[str] = set()
    find_first = sandbox_module._first_process

    def recorded(info):  # type: ignore[no-untyped-def]
        first = find_first(info)
        namespaces.add(os.readlink(f"/proc/{first}/ns/pid"))
        return first

    monkeypatch.setattr(sandbox_module, "_first_process", recorded)

    def living() -> list[str]:
        assert namespaces, "no sandbox ran"
        assert os.readlink("/proc/self/ns/pid") not in namespaces
        found = []
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and os.readlink(process / "ns/pid") in namespaces:
                    found.append((process / "cmdline").read_text())
            except OSError:  # another user's, or ended meanwhile
                continue
        return found

    return living
