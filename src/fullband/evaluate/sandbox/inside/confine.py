"""What a process inside does to itself before it runs code it does not trust. Limits that the namespaces outside don't set."""

from __future__ import annotations

import contextlib
import os
from typing import TypedDict


class Limits(TypedDict):
    """Seconds, bytes and counts, as the host states them."""

    seconds: float
    memory: int
    processes: int
    disk: int


def set_limits(limits: Limits, sandboxed: bool) -> None:
    """Limits of this process and of each that it starts. Outside a sandbox, those that the system has."""
    try:
        import resource
    except ImportError:  # Windows
        return
    seconds = int(limits["seconds"]) + 1
    wanted = {
        "RLIMIT_AS": limits["memory"],
        "RLIMIT_CPU": seconds,
        "RLIMIT_FSIZE": limits["disk"],
        "RLIMIT_CORE": 1,  # too small for a core, and unlike 0 none goes to a program of the host that collects them
        "RLIMIT_NOFILE": 64,
        "RLIMIT_MSGQUEUE": 0,
    }
    if sandboxed:  # outside, it would count everything the user runs
        wanted["RLIMIT_NPROC"] = limits["processes"]
    for name, most in wanted.items():
        with contextlib.nullcontext() if sandboxed else contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (most, most))


def die_first() -> None:
    """Should the machine run out of memory, the kernel ends this process and those that it starts, rather than the host."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def become(user: int) -> None:
    """Change from root to a user that owns nothing, for good."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def hide_memory() -> None:
    """Keep processes of the same user from reading this one's memory and open files (/proc, ptrace). Linux; nothing elsewhere."""
    if os.path.isdir("/proc/self"):
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0) != 0:  # PR_SET_DUMPABLE
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
