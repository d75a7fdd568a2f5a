"""Programs that nobody trusts, each in a process of its own with a deadline and limits.

    run(program, stdin, limits) -> Ran(stdout, how it ended)

Two tiers, of which `auto` takes the stronger that this machine has:

    process      cleared environment, scratch folder, limits of memory, CPU, file size, processes and output; everything
                 that descends from the program is killed with it. Network, readable files and other processes of the
                 same user stay in reach.
    namespace    besides, namespaces of its own for network, processes and IPC: no network, not even loopback; no other
                 process can be seen; nothing survives. Readable files stay in reach.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import IO, Literal, get_args

from attrs import asdict, field, frozen

from skyrl.errors import UserError
from skyrl.processes import sandbox_launch

Tier = Literal["process", "namespace"]
LAUNCHER = Path(__file__).with_name("sandbox_launch.py")
GRACE = 0.5
"""Seconds that the launcher gets, after the deadline, to end what it launched."""


@frozen(kw_only=True)
class Limits:
    """What a program may take. Beyond any of these it is ended."""

    seconds: float = 10.0
    """Wall-clock time, from the start of the interpreter."""

    cpu_seconds: int = field(default=10)
    memory_bytes: int = 1 << 30
    """Address space of each process."""

    file_bytes: int = 32 << 20
    """Size of each file that it writes."""

    processes: int = 64
    """Of the user, on the whole machine. The kernel does not apply this to root."""

    output_bytes: int = 1 << 20
    """What it may print. The rest is not read."""


@frozen(kw_only=True)
class Ran:
    """How a program ended, and what it printed."""

    ended: Literal["exit", "timeout", "output"]
    """exit: by itself or by a limit, see `code`; timeout: at its deadline; output: it printed too much."""

    code: int
    """Exit code; 128 + signal if a signal ended it. Means nothing unless `ended` is exit."""

    stdout: bytes
    stderr: bytes


class Sandbox:
    """Runs programs in one tier. Safe to use from several threads."""

    def __init__(self, tier: Tier | Literal["auto"] = "auto") -> None:
        """Raises `UserError` if this machine does not have the tier: it is never replaced by a weaker one."""
        self.tier: Tier = strongest_tier() if tier == "auto" else tier
        if not _is_available(self.tier):
            raise UserError(
                f"the sandbox tier {self.tier!r} is not available on this machine: it needs the command `unshare` and "
                "a kernel that lets this user make namespaces. 'process' is weaker and needs neither"
            )

    def run(self, program: str, stdin: bytes = b"", limits: Limits | None = None) -> Ran:
        """Run Python source in a folder that is new and removed afterwards, and return when nothing of it is left."""
        folder = Path(tempfile.mkdtemp(prefix="skyrl-sandbox-"))
        try:
            return self._run(folder, program, stdin, limits or Limits())
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folder: Path, program: str, stdin: bytes, limits: Limits) -> Ran:
        source, given = folder / "program.py", folder / "stdin"
        source.write_text(program, encoding="utf-8", errors="replace")
        given.write_bytes(stdin)
        command = [
            *_PREFIX[self.tier],
            sys.executable,
            "-I",
            "-S",
            str(LAUNCHER),
            json.dumps(asdict(limits)),
            str(source),
        ]
        with given.open("rb") as opened:
            process = subprocess.Popen(
                command,
                stdin=opened,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder)},
                start_new_session=True,
                close_fds=True,
            )
        try:
            stdout, stderr, whole = _read(process, limits)
            code = process.wait(max(0.0, limits.seconds + GRACE)) if whole else -1
        except subprocess.TimeoutExpired:
            code, whole = sandbox_launch.TIMED_OUT, True
        finally:
            _end(process)
        if not whole:
            return Ran(ended="output", code=code, stdout=stdout, stderr=stderr)
        ended: Literal["exit", "timeout"] = "timeout" if code == sandbox_launch.TIMED_OUT else "exit"
        return Ran(ended=ended, code=code if code >= 0 else 128 - code, stdout=stdout, stderr=stderr)


@cache
def strongest_tier() -> Tier:
    """Of those that this machine has."""
    return "namespace" if _is_available("namespace") else "process"


def _read(process: subprocess.Popen[bytes], limits: Limits) -> tuple[bytes, bytes, bool]:
    """Both outputs, and whether they were within the limit, until they close or time is up."""
    assert process.stdout is not None and process.stderr is not None, "both are pipes"
    kept: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    deadline = time.monotonic() + limits.seconds + GRACE
    whole = True
    with selectors.DefaultSelector() as selector:
        for pipe in kept:
            selector.register(pipe, selectors.EVENT_READ)
        while whole and selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                pipe = process.stdout if key.fileobj is process.stdout else process.stderr
                data = os.read(pipe.fileno(), 65536)
                if not data:
                    selector.unregister(pipe)
                kept[pipe] += data
                whole = whole and len(kept[pipe]) <= limits.output_bytes
    outputs = [bytes(data[: limits.output_bytes]) for data in kept.values()]
    return outputs[0], outputs[1], whole


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of it is left when this returns. The launcher is asked first: it knows its descendants."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


_PREFIX: dict[Tier, tuple[str, ...]] = {
    "process": (),
    "namespace": (
        *("unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child=KILL"),
        "--mount-proc",
    ),
}


@cache
def _is_available(tier: Tier) -> bool:
    assert tier in get_args(Tier), tier
    if tier == "process":
        return sys.platform == "linux"
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*_PREFIX[tier], "true"], capture_output=True, timeout=10, check=False)
    return tried.returncode == 0
