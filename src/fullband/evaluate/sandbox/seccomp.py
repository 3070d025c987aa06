"""A seccomp filter: system calls that no solution needs and that would get round the sandbox's limits are refused.

New namespaces and mounts (file systems without a size limit), memory that no process is charged for (memfd, System V, pages that a pipe
keeps, buffers of Internet sockets and large ones of local sockets, huge pages, watches, asynchronous reads), other processes' memory,
limits and scheduling, all address families but local ones (vsock is in no network namespace), the kernel's log, and its less used
interfaces. Shared memory without a file is refused too: its pages stay when no process maps them, and count for none.
The rest stays allowed: threads, files, local sockets.
"""

from __future__ import annotations

import platform
import struct

_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUALS, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _THIRD_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 32, 40  # offsets in struct seccomp_data
_LOCAL = 1  # AF_UNIX
_SEND_BUFFER = 7  # SO_SNDBUF: what a local socket holds is in no process, and the default is small
_SHARED, _ANONYMOUS, _HUGE_PAGES = 0x01, 0x20, 0x40000  # of mmap's flags; MAP_SHARED_VALIDATE has the first bit too
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME | NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

_SINCE_5_1 = {  # numbers that all architectures share
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "memfd_secret": 447, "process_mrelease": 448,
}  # fmt: skip
_CLONE3 = 435
_ASKED = ("clone", "mmap", "prlimit64", "socket", "socketpair", "setsockopt")  # those whose arguments decide
_MACHINES: dict[str, tuple[int, tuple[int, ...], dict[str, int]]] = {  # AUDIT_ARCH, numbers of _ASKED, the others
    "x86_64": (0xC000003E, (56, 9, 302, 41, 53, 54), {
        "shmget": 29, "msgget": 68, "ptrace": 101, "pivot_root": 155, "mount": 165, "umount2": 166, "mq_open": 240, "add_key": 248,
        "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
        "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203, "ioprio_set": 251,
        "migrate_pages": 256, "move_pages": 279, "sched_setattr": 314,
        "semget": 64, "syslog": 103, "io_setup": 206, "inotify_init": 253, "splice": 275, "tee": 276, "vmsplice": 278,
        "inotify_init1": 294, "fanotify_init": 300,
    }),
    "aarch64": (0xC00000B7, (220, 222, 261, 198, 199, 208), {
        "umount2": 39, "mount": 40, "pivot_root": 41, "unshare": 97, "ptrace": 117, "mq_open": 180, "msgget": 186, "shmget": 194,
        "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
        "ioprio_set": 30, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "setpriority": 140,
        "migrate_pages": 238, "move_pages": 239, "sched_setattr": 274,
        "io_setup": 0, "inotify_init1": 26, "vmsplice": 75, "splice": 76, "tee": 77, "syslog": 116, "semget": 190, "fanotify_init": 262,
    }),
}  # fmt: skip


def program(machine: str | None = None) -> bytes:
    """The filter for this machine (or another, by its `uname -m`), an array of struct sock_filter. Raises ValueError if there is none."""
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise ValueError(f"the sandbox is made for {' and '.join(_MACHINES)} processors, not {machine}")
    architecture, asked, denied = _MACHINES[machine]
    clone, mmap, prlimit, socket, socketpair, setsockopt = asked
    rules = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUALS, architecture, yes=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, 0x40000000, no=1),  # x86's second set of numbers
        _step(_RETURN, _ERRNO | _ENOSYS),
        _step(_EQUALS, _CLONE3, no=1),  # its flags can't be seen; libc then uses clone
        _step(_RETURN, _ERRNO | _ENOSYS),
    ]
    for number in sorted([*denied.values(), *_SINCE_5_1.values()]):
        rules += [_step(_EQUALS, number, no=1), _step(_RETURN, _ERRNO | _EPERM)]
    forbidden, allowed = _step(_RETURN, _ERRNO | _EPERM), _step(_RETURN, _ALLOW)
    namespaces = [_step(_LOAD, _FIRST_ARGUMENT), _step(_ANY_BIT, _NEW_NAMESPACES, no=1), forbidden, allowed]
    own_limits = [_step(_LOAD, _FIRST_ARGUMENT), _step(_EQUALS, 0, yes=1), forbidden, allowed]  # 0: of the process itself
    memory = [
        *(_step(_LOAD, _FOURTH_ARGUMENT), _step(_ANY_BIT, _HUGE_PAGES, yes=2)),
        *(_step(_ANY_BIT, _ANONYMOUS, no=2), _step(_ANY_BIT, _SHARED, no=1)),
        *(forbidden, allowed),
    ]
    family = [_step(_LOAD, _FIRST_ARGUMENT), _step(_EQUALS, _LOCAL, yes=1), _step(_RETURN, _ERRNO | _EAFNOSUPPORT), allowed]
    option = [_step(_LOAD, _THIRD_ARGUMENT), _step(_EQUALS, _SEND_BUFFER, no=1), forbidden, allowed]
    asks = ((clone, namespaces), (prlimit, own_limits), (mmap, memory), (socket, family), (socketpair, family), (setsockopt, option))
    for number, steps in asks:
        rules += [_step(_EQUALS, number, no=len(steps)), *steps]
    return b"".join([*rules, allowed])


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` are how many of the next ones to skip."""
    return struct.pack("=HBBI", code, yes, no, value)
