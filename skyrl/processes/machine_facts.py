"""Facts about one machine: versions, memory, GPUs, and the paths that it sees; and the memory of this process. Imports
nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from attrs import frozen

from skyrl.installation import __version__

PACKAGES = ("torch", "ray", "transformers", "vllm", "deepspeed")
"""Packages whose versions have to agree, beside skyrl's own."""

_QUERY = ("index", "name", "ecc.errors.uncorrected.volatile.total")
_SECONDS = 20.0


@frozen(kw_only=True)
class GpuFacts:
    """One GPU, as nvidia-smi reports it."""

    index: str
    name: str
    uncorrected_errors: int | None
    """Uncorrected memory errors since the driver was loaded; None if the GPU does not count them."""


@frozen(kw_only=True)
class MachineFacts:
    """Facts about one machine of a cluster."""

    host: str
    versions: Mapping[str, str]
    """Version of Python, of skyrl, of each of `PACKAGES` that is installed, and a digest of skyrl's code, by name."""

    memory: int
    """Bytes of available memory."""

    total_memory: int
    gpus: Sequence[GpuFacts]
    gpu_problem: str
    """Reason why nvidia-smi, although installed, reports nothing."""

    lacking: Sequence[str]
    """Requested paths that cannot be read."""

    unwritable: Sequence[str]
    """Requested folders in which this user may not write."""


def facts_here(readable: Sequence[str], writable: Sequence[str]) -> MachineFacts:
    """Facts about this machine. `readable` are files and folders that must be readable, `writable` folders that must be
    writable.
    """
    gpus, problem = _gpus()
    memory, total = _memory()
    return MachineFacts(
        host=socket.gethostname(),
        versions={**installed_versions(PACKAGES), "skyrl's code": code_digest()},
        memory=memory,
        total_memory=total,
        gpus=gpus,
        gpu_problem=problem,
        lacking=[path for path in readable if not os.access(path, os.R_OK)],
        unwritable=[path for path in writable if not os.access(path, os.W_OK)],
    )


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python, of skyrl, and of those of these packages that are installed."""
    versions = {"python": platform.python_version(), "skyrl": __version__}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def code_digest() -> str:
    """A short digest of all Python files of skyrl: two checkouts of one version may differ."""
    root, digest = Path(__file__).parents[1], sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _memory() -> tuple[int, int]:
    """Available and total memory in bytes; 0 if the kernel does not say."""
    bytes_by_name = dict.fromkeys(("MemAvailable", "MemTotal"), 0)
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, amount = line.partition(":")
            if name in bytes_by_name:
                bytes_by_name[name] = int(amount.split()[0]) * 1024
    return bytes_by_name["MemAvailable"], bytes_by_name["MemTotal"]


def _gpus() -> tuple[list[GpuFacts], str]:
    """The GPUs, and the reason if there should be some but they are not known."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if result.returncode:
        return [], " ".join((result.stderr or result.stdout).split())[:200] or f"exit code {result.returncode}"
    return list(read_gpus(result.stdout)), ""


def read_gpus(text: str) -> Iterator[GpuFacts]:
    """The rows that nvidia-smi printed for `_QUERY`; what it does not know, such as `[N/A]`, is None."""
    for line in text.splitlines():
        index, name, errors = (part.strip() for part in line.split(","))
        yield GpuFacts(index=index, name=name, uncorrected_errors=int(errors) if errors.isdecimal() else None)


def resident_bytes() -> int:
    """Resident memory of this process in bytes, shared libraries included; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
