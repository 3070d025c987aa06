"""The command line of bubblewrap that makes the sandbox: what can be seen in it, and as whom."""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
HINT = "install bubblewrap (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap)"
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # folders of / that hold or point to programs and libraries
_SETTINGS = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/nix/store")
_OLDEST = (0, 7)  # the first with --size


@dataclass(frozen=True)
class Interpreter:
    """This Python as the sandbox sees it: its program, the folders to show (outside, inside) and those of installed packages, and where
    the loader finds its library, which the program may name by a path that is not shown."""

    program: str
    shown: tuple[tuple[str, str], ...]
    packages: tuple[str, ...]
    libraries: str | None = None


@functools.cache
def interpreter() -> Interpreter:
    """Where this Python and its packages stand inside. They get paths of their own, so that a home folder they lie in is not shown.

    Raises ValueError for a Python whose program is outside its own installation.
    """
    base, program = Path(sys.base_prefix).resolve(), Path(sys.executable).resolve()
    if not program.is_relative_to(base):
        raise ValueError(f"the sandbox can't show this Python: {program} is not within {base}")
    shown, libraries = [], None
    if not base.is_relative_to("/usr"):
        shown.append((str(base), "/python"))
        program = Path("/python") / program.relative_to(base)
        folder = Path(sysconfig.get_config_var("LIBDIR") or base.parent).resolve()
        if folder.is_relative_to(base) and sysconfig.get_config_var("Py_ENABLE_SHARED"):
            libraries = str(Path("/python") / folder.relative_to(base))
    packages: list[str] = []
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    for outside in filter(os.path.isdir, folders):
        packages.append(f"/packages/{len(packages)}")
        shown.append((outside, packages[-1]))
    return Interpreter(str(program), tuple(shown), tuple(packages), libraries)


@functools.cache
def bubblewrap() -> str:
    """Path of bubblewrap. Raises ValueError that says how to get it."""
    if sys.platform != "linux":
        raise ValueError(f"the sandbox needs Linux and bubblewrap, not {sys.platform}; running without it must be asked for")
    path = shutil.which("bwrap")
    if path is None:
        raise ValueError(f"running a model's code needs a sandbox: {HINT}")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ValueError(f"bubblewrap {version} is too old: 0.7 or newer is needed")
    return path


def users() -> tuple[int, int] | None:
    """For root: two users that own nothing, for the tester and the solution, other ones in each sandbox (the kernel counts processes by
    user, and does not count root's). None for anybody else, who gets a user namespace instead."""
    if os.geteuid() != 0:
        return None
    first, last = (0x60000000, 0x6FFFFFFF) if _is_a_user(0x6FFFFFFF) else (20000, 59999)  # a container may have 65536 users only
    user = random.SystemRandom().randrange(first, last)
    return user, user + 1


def _is_a_user(user: int) -> bool:
    ranges = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(start <= user < start + count for start, _, count in ranges)


@functools.cache
def _telling(folder: str) -> tuple[str, ...]:
    """Files of installed packages that name folders of the host: where editable installations and their sources lie."""
    patterns = ("*.pth", "*.egg-link", "__editable__*", "*.dist-info/direct_url.json")
    return tuple(str(path.relative_to(folder)) for pattern in patterns for path in sorted(Path(folder).glob(pattern)) if path.is_file())


def command(*, disk: int, as_root: bool, filter_fd: int, info_fd: int) -> list[str]:
    """Arguments of bubblewrap, up to the program to run. `disk` in bytes, for each of /tmp and /dev/shm, the only places to write to."""
    python = interpreter()
    given = environment(program_folder="/fullband") | ({"LD_LIBRARY_PATH": python.libraries} if python.libraries else {})
    shown = [*python.shown, (str(INSIDE), f"/fullband/{INSIDE.name}")]
    nothing = [(os.devnull, f"{inside}/{path}") for outside, inside in python.shown for path in _telling(outside)]
    rights = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID" if as_root else "--unshare-user --uid 65534 --gid 65534"
    return [
        *(bubblewrap(), "--unshare-pid", "--unshare-ipc", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", *rights.split()),
        *("--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"),
        *(word for setting in given.items() for word in ("--setenv", *setting)),
        *("--ro-bind", "/usr", "/usr"),
        *(word for name in _LINKED for word in _linked(Path("/") / name)),
        *(word for path in _SETTINGS for word in ("--ro-bind-try", path, path)),
        *("--dir", "/fullband", "--dir", "/packages"),  # else they are made as root's alone
        *(word for place in (*shown, *nothing) for word in ("--ro-bind", *place)),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--dev-bind", os.devnull, "/dev/zero"),  # a shared mapping of it is memory of no process
        *("--ro-bind", os.devnull, "/proc/cmdline"),  # the host's kernel may have been told secrets
        *(word for writable in ("/dev/shm", "/tmp") for word in ("--perms", "1777", "--size", str(disk), "--tmpfs", writable)),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"),
        *("--seccomp", str(filter_fd), "--info-fd", str(info_fd), "--"),
    ]


def _linked(folder: Path) -> list[str]:
    """What shows a folder of / that may be a link, or not be there."""
    if folder.is_symlink():
        return ["--symlink", os.readlink(folder), str(folder)]
    return ["--ro-bind", str(folder), str(folder)] if folder.is_dir() else []


def environment(program_folder: str, temporary: str = "/tmp") -> dict[str, str]:
    """Environment of the programs inside: nothing of the user's. Hashes have no seed, so a verdict does not change from run to run."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": temporary,
        "TMPDIR": temporary,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": program_folder,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
