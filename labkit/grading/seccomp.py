"""Which calls of the system are refused in the sandbox, as a filter that bubblewrap loads (``--seccomp``).

New namespaces and mounts would undo the sandbox's own, looking into other processes would undo that answers run apart,
and memory that belongs to no process (memfd, System V) would be counted for nobody. The filter is a list of
instructions for Linux' classic BPF: seccomp(2), linux/filter.h, linux/audit.h. Numbers of calls: arch/x86/entry/
syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH = 0, 4  # where in seccomp_data
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_X32 = 0x40000000  # calls of a third kind of program on x86-64
_NEW_SPACES = 0x7E020000 | 0x80  # CLONE_NEW*: user, mounts, processes, network, ipc, names, cgroups, times
_SHARED_WITH_NOBODY = 0x21  # MAP_SHARED and MAP_ANONYMOUS
_BOTH = {
    "memfd_secret": 447, "io_uring_setup": 425, "pidfd_getfd": 438, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "mount_setattr": 442, "clone3": 435,
}  # fmt: skip
_CALLS = {
    "x86_64": {
        "clone": 56, "mmap": 9, "memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64, "unshare": 272,
        "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "ptrace": 101,
        "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "add_key": 248, "request_key": 249, "keyctl": 250, **_BOTH,
    },
    "aarch64": {
        "clone": 220, "mmap": 222, "memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190, "unshare": 97,
        "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "ptrace": 117,
        "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "add_key": 217, "request_key": 218, "keyctl": 219, **_BOTH,
    },
}  # fmt: skip
_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_OF_DRIVERS = ("memfd_create", "ptrace")  # a card's driver may need them: what they take is counted instead


def known(machine: str | None = None) -> bool:
    """Whether there is a filter for this kind of processor."""
    return (machine or platform.machine()) in _CALLS


def program(*, card: bool, machine: str | None = None) -> bytes:
    """The filter for this kind of processor; with a `card`, its driver may share memory. Raises `KeyError` where there
    is none."""
    machine = machine or platform.machine()
    calls = dict(_CALLS[machine])
    clone, mmap = calls.pop("clone"), calls.pop("mmap")
    refused = _ERROR | errno.EPERM
    found = [
        (_LOAD, 0, 0, _ARCH),
        (_IF_EQUAL, 1, 0, _ARCHES[machine]),
        (_RETURN, 0, 0, refused),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        found += [(_IF_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, refused)]
    for name, number in calls.items():
        if not (card and name in _OF_DRIVERS):
            # its flags cannot be seen: without it, glibc uses clone
            error = errno.ENOSYS if name == "clone3" else errno.EPERM
            found += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]
    found += [
        (_IF_EQUAL, 0, 4, clone), (_LOAD, 0, 0, _argument(0)), (_IF_ANY, 0, 1, _NEW_SPACES), (_RETURN, 0, 0, refused),
        (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    if not card:
        found += [
            (_IF_EQUAL, 0, 5, mmap), (_LOAD, 0, 0, _argument(3)), (_AND, 0, 0, _SHARED_WITH_NOBODY),
            (_IF_EQUAL, 0, 1, _SHARED_WITH_NOBODY), (_RETURN, 0, 0, _ERROR | errno.ENOMEM), (_RETURN, 0, 0, _ALLOW),
        ]  # fmt: skip
    return _packed([*found, (_RETURN, 0, 0, _ALLOW)])


def _argument(number: int) -> int:
    """Where the lower half of an argument stands; both kinds of processors have that first."""
    return 16 + 8 * number


def _packed(instructions: Iterable[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("<HBBI", *one) for one in instructions)
