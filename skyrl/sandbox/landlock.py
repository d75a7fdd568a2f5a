"""Keeps a program apart from other processes of its user, by the kernel's Landlock. Imports the standard library alone.

A process in a Landlock domain writes only where rules allow it, and cannot look into processes outside: their memory,
environment, open files. From version 6 on it cannot send them signals or reach their abstract sockets either.
"""

import ctypes
import os
import struct
import sys

OLDEST, SIGNALS = 3, 6
"""Versions of the interface: the first that refuses every way to write (Linux 6.2), the first that scopes (6.12)."""

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_ASK_VERSION, _BENEATH = 1, 1
_WRITE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_ALL_WRITES = _WRITE | sum(1 << bit for bit in range(4, 13)) | _REFER | _TRUNCATE
"""Rights to write, remove, create anything, move between folders, and truncate."""

_SCOPED = 3
"""Abstract sockets and signals."""


def version() -> int:
    """Version of the kernel's Landlock; 0 if it has none that is of use."""
    if sys.platform != "linux":
        return 0
    abi: int = _call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    return abi if abi >= OLDEST else 0


def restrict() -> None:
    """Let this process and its descendants write in the current folder, in /dev/shm and to devices alone, and keep them
    apart from all other processes. Does nothing if the kernel has no Landlock.

    Needs "no new privileges" to be set. Raises OSError.
    """
    abi = version()
    if not abi:
        return
    attributes = struct.pack("QQQ", _ALL_WRITES, 0, _SCOPED) if abi >= SIGNALS else struct.pack("Q", _ALL_WRITES)
    rules = _checked(_call(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)))
    try:
        for path, rights in ((".", _ALL_WRITES), ("/dev/shm", _ALL_WRITES), ("/dev", _WRITE | _TRUNCATE)):
            if os.path.isdir(path):
                _allow(rules, path, rights)
        _checked(_call(_RESTRICT, rules, ctypes.c_uint32(0)))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        _checked(_call(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", rights, folder), ctypes.c_uint32(0)))
    finally:
        os.close(folder)


def _call(*arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(*arguments)
    return result


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
