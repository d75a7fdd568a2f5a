"""Tiers of isolation for untrusted programs, and which of them a machine has.

    process      cleared environment, a new folder, limits on memory, CPU, file size, processes and output; all
                 descendants of the program are killed with it; no network sockets. Readable files stay reachable, and
                 without Landlock (`landlock.py`) all files and processes of the same user.
    namespace    in addition, separate namespaces for network, processes, IPC and mounts: no network, not even loopback;
                 no other process can be seen; nothing survives; only its own folder, which is in memory, can be
                 written. Readable files stay reachable.
    bwrap        in addition, a separate file system (bubblewrap) with Python and the given readable files only.

A run of root's also gives each program a separate user id, in every tier, and a control group for its memory if the
machine allows it to create some (`memory_groups.py`).
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
"""All tiers, the weakest first."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


def has_namespaces(tier: Tier) -> bool:
    """Whether each program gets its own namespaces."""
    return tier != "process"


def bubblewrap(folder: str, readable: Sequence[str]) -> list[str]:
    """Start of a command that creates new, almost empty mounts, in which the paths `readable` and an empty `folder` are
    seen. The fork server separates processes, network and IPC itself.
    """
    arguments = [shutil.which("bwrap") or "bwrap", "--proc", "/proc", "--dev", "/dev", "--dir", folder, "--chdir", "/"]
    for path in _SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    for path in _SETTINGS:
        arguments += ["--ro-bind-try", path, path]
    seen: list[str] = [path for path in _SYSTEM if os.path.isdir(path)]
    for path in sorted({str(Path(item).absolute()) for item in readable if item}, key=len):
        if os.path.exists(path) and not any(Path(path).is_relative_to(entry) for entry in seen):
            arguments += ["--ro-bind", path, path]
            seen.append(path)
    return [*arguments, *(("--cap-add", "ALL") if os.geteuid() == 0 else ("--unshare-user",)), "--"]


def needed_by_python() -> tuple[str, ...]:
    """Paths of the interpreter and its libraries."""
    return tuple(dict.fromkeys([sys.base_prefix, sys.prefix, os.path.dirname(os.path.realpath(sys.executable))]))
