"""How well programs that nobody trusts are kept apart, and which of these ways a machine has.

    process      cleared environment, a new folder, limits of memory, CPU, file size, processes and output; everything
                 that descends from the program is killed with it; no sockets of the network. Other processes of the
                 same user, and files, stay in reach.
    namespace    besides, namespaces of its own for network, processes, IPC and mounts: no network, not even loopback;
                 no other process can be seen; nothing survives; nothing can be written but its own folder, which is in
                 memory. Readable files stay in reach.
    bwrap        besides, a file system of its own (bubblewrap): Python and what it was given to read, nothing else.

A run of root's moreover gives each program a user id of its own, in every tier, and a control group for its memory
where the machine lets it make some (`memory_groups.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

Tier = Literal["process", "namespace", "bwrap"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""The weakest first."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


def has_namespaces(tier: Tier) -> bool:
    """Is each program in namespaces of its own?"""
    return tier != "process"


def missing(tier: Tier) -> str:
    """The command that the tier needs and this machine lacks; empty if there is none."""
    return "bwrap" if tier == "bwrap" and shutil.which("bwrap") is None else ""


def command(tier: Tier, python: Sequence[str], *, folder: str, readable: Sequence[str]) -> list[str]:
    """Command that starts the fork server in this tier: `python` is its command without a tier, `readable` what it
    reads.
    """
    return [*_bubblewrap(folder, readable), *python] if tier == "bwrap" else list(python)


def _bubblewrap(folder: str, readable: Sequence[str]) -> list[str]:
    """New mounts with little in them. Processes, network and IPC are separated for each program by the fork server."""
    arguments = [shutil.which("bwrap") or "bwrap", "--proc", "/proc", "--dev", "/dev", "--dir", folder, "--chdir", "/"]
    for path in _SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    for path in _SETTINGS:
        arguments += ["--ro-bind-try", path, path]
    seen: list[str] = [path for path in _SYSTEM if os.path.isdir(path)]
    for path in sorted({str(Path(each).absolute()) for each in readable if each}, key=len):
        if os.path.exists(path) and not any(Path(path).is_relative_to(each) for each in seen):
            arguments += ["--ro-bind", path, path]
            seen.append(path)
    return [*arguments, *(("--cap-add", "ALL") if os.geteuid() == 0 else ("--unshare-user",)), "--"]


def needed_by_python() -> tuple[str, ...]:
    """Paths of the interpreter and its libraries."""
    return tuple(dict.fromkeys([sys.base_prefix, sys.prefix, os.path.dirname(os.path.realpath(sys.executable))]))
