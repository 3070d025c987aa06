"""A seccomp filter: system calls that no solution needs and that would get round the sandbox's limits are refused.

New namespaces and mounts (file systems without a size limit), memory that no process is charged for (memfd, System V), other processes'
memory, and the kernel's less used interfaces. The rest stays allowed: threads, files, sockets (there is no network to reach).
"""

from __future__ import annotations

import platform
import struct

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUALS, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME | NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

_SINCE_5_1 = {  # numbers that all architectures share
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "pidfd_getfd": 438,
    "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
_CLONE3 = 435
_MACHINES: dict[str, tuple[int, int, dict[str, int]]] = {  # AUDIT_ARCH, clone, the others
    "x86_64": (0xC000003E, 56, {
        "shmget": 29, "msgget": 68, "ptrace": 101, "pivot_root": 155, "mount": 165, "umount2": 166, "mq_open": 240, "add_key": 248,
        "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
    }),
    "aarch64": (0xC00000B7, 220, {
        "umount2": 39, "mount": 40, "pivot_root": 41, "unshare": 97, "ptrace": 117, "mq_open": 180, "msgget": 186, "shmget": 194,
        "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
    }),
}  # fmt: skip


def program(machine: str | None = None) -> bytes:
    """The filter for this machine (or another, by its `uname -m`), an array of struct sock_filter. Raises ValueError if there is none."""
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise ValueError(f"the sandbox is made for {' and '.join(_MACHINES)} processors, not {machine}")
    architecture, clone, denied = _MACHINES[machine]
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
    rules += [
        _step(_EQUALS, clone, no=3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_ANY_BIT, _NEW_NAMESPACES, no=1),
        _step(_RETURN, _ERRNO | _EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(rules)


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` are how many of the next ones to skip."""
    return struct.pack("=HBBI", code, yes, no, value)
