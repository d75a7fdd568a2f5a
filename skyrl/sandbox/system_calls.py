"""System calls refused to programs, by a seccomp filter that they cannot remove. Imports the standard library alone.

Refused are sockets other than UNIX sockets (a process in a network namespace of its own may also open IPv4 sockets),
shared memory and messages of System V and POSIX queues (they outlive a program), memory files (they escape its limits),
new namespaces, tracing, and interfaces with a long history of vulnerabilities in the kernel.
"""

import ctypes
import errno
import os
import socket
from collections.abc import Iterator

_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`, on a little-endian machine."""

_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SPECIAL = {
    "x86_64": {"clone": 56, "clone3": 435, "socket": 41},
    "aarch64": {"clone": 220, "clone3": 435, "socket": 198},
}
_REFUSED = {
    # name: (x86_64, aarch64)
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "fanotify_init": (300, 262),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def refuse(*, own_network: bool = False) -> None:
    """Refuse these calls to this process and its descendants from now on. `own_network` allows IPv4 sockets.

    Needs "no new privileges" to be set. Raises OSError if the kernel or the processor has no such filter.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"sandboxes know the system calls of {', '.join(_ARCHITECTURES)}, not of {machine}")
    instructions = [_Instruction(*item) for item in _filter(machine, own_network=own_network)]
    array = (_Instruction * len(instructions))(*instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_Program(len(instructions), array))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _filter(machine: str, *, own_network: bool) -> Iterator[tuple[int, int, int, int]]:
    """Classic BPF instructions: code, jump if true, jump if not, and operand of each."""
    special, column = _SPECIAL[machine], list(_ARCHITECTURES).index(machine)
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, _ARCHITECTURES[machine]
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield _AT_LEAST, 0, 1, _X32
    yield _RETURN, 0, 0, _REFUSE | errno.ENOSYS
    for numbers in _REFUSED.values():
        yield _EQUAL, 0, 1, numbers[column]
        yield _RETURN, 0, 0, _REFUSE | errno.EPERM
    yield _EQUAL, 0, 1, special["clone3"]  # its flags are out of reach; the C library then takes clone
    yield _RETURN, 0, 0, _REFUSE | errno.ENOSYS
    yield _EQUAL, 0, 4, special["clone"]
    yield _LOAD, 0, 0, _FIRST_ARGUMENT
    yield _ANY_BIT, 0, 1, _NEW_NAMESPACES
    yield _RETURN, 0, 0, _REFUSE | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW
    families = [socket.AF_UNIX, *([socket.AF_INET] if own_network else [])]
    yield _EQUAL, 0, 3 + len(families), special["socket"]
    yield _LOAD, 0, 0, _FIRST_ARGUMENT
    for index, family in enumerate(families):
        yield _EQUAL, len(families) - index, 0, int(family)
    yield _RETURN, 0, 0, _REFUSE | errno.EAFNOSUPPORT
    yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, _ALLOW
