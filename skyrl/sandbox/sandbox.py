"""Runs untrusted programs, each in a separate process with a deadline and limits.

    Sandbox(tier).run(program, stdin, limits) -> Ran(stdout, how it ended)
    ConfinedProcess(sandbox, limits, streams, command=...) -> close() -> how it ended

Tiers are in `tiers.py`. A process is forked from a warm interpreter (`fork_server.py`), so that a call takes
milliseconds and shares no state with earlier calls.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Literal

from attrs import asdict, field, frozen

from skyrl.errors import ProcessError, UserError
from skyrl.sandbox import landlock
from skyrl.sandbox.confinement import is_reachable, unused_user_id
from skyrl.sandbox.fork_client import Command, ForkClient
from skyrl.sandbox.fork_server import LISTENING, TIMED_OUT
from skyrl.sandbox.forwarding import forwarding
from skyrl.sandbox.tiers import TIERS, Tier, has_namespaces

GRACE = 0.5
"""Seconds that the supervisor has, after the deadline, to end the processes that it started."""

FOREVER = 10**6
"""Seconds of a process that has no deadline."""


@frozen(kw_only=True)
class ResourceLimits:
    """Resources that a program may use. It is ended when it exceeds any of them."""

    seconds: float = 10.0
    """Wall-clock time."""

    cpu_seconds: int = field(default=10)
    memory_bytes: int = 1 << 30
    """Address space of each process, and resident memory of all its processes together."""

    file_bytes: int = 32 << 20
    """Size of each file that it writes."""

    folder_bytes: int = 64 << 20
    """Size of all its files together if its folder is in memory (every tier but `process`), with the same size again in
    /dev/shm."""

    processes: int = 64
    """Processes and threads of the program. In the tier `process`, if the run is not root's, the kernel can only count
    those of the user: the limit is then four times this number, plus all that run on the machine."""

    open_files: int = 64
    output_bytes: int = 1 << 20
    """Bytes of output that are read; the rest is discarded."""


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

    def __init__(
        self, tier: Tier | Literal["auto"] = "auto", *, readable: Sequence[Path] = (), modules: Sequence[str] = ()
    ) -> None:
        """`readable` are files and folders that programs need; `modules` are imported in workers in advance.

        Raises `UserError` if this machine does not have the tier, which is never replaced by a weaker one, or if
        programs could not read one of the files.
        """
        self.tier: Tier = strongest_tier() if tier == "auto" else tier
        reason = why_unavailable(self.tier)
        if reason:
            have = ", ".join(item for item in TIERS if not why_unavailable(item)) or "none"
            raise UserError(f"the sandbox tier {tier!r} is not available on this machine: {reason}. Available: {have}")
        self._readable = tuple(path.absolute() for path in readable)
        for path in self._readable:
            if path.exists() and not self._may_read(path, path):
                raise UserError(
                    f"a run started by root gives sandboxed programs users of their own, which cannot read {path}: "
                    f"chmod -R o+rX {path}"
                )
        self.client = ForkClient(self.tier, readable, modules)

    def run(
        self, program: str, stdin: bytes = b"", limits: ResourceLimits | None = None, *, until: int | None = None
    ) -> Ran:
        """Run Python source in a new folder, which is removed afterwards, and return when nothing of it is left.

        The program is ended at once when the descriptor `until` becomes readable. Raises `ProcessError` if the sandbox
        itself does not work.
        """
        return _run(self.client, program, stdin, limits or ResourceLimits(), until)

    def run_command(self, command: Command, stdin: bytes = b"", limits: ResourceLimits | None = None) -> Ran:
        """Run a command with the limits of `run`. The only network address it can reach is that of its service.

        Raises `ProcessError` if the sandbox itself fails, and in the tier `process`, which has no network namespaces.
        """
        if not has_namespaces(self.tier):
            raise ProcessError(f"the sandbox tier {self.tier!r} gives a command no network of its own")
        return _run(self.client, command, stdin, limits or ResourceLimits())

    def record(self) -> dict[str, object]:
        """The tier and limits in force, for the run's record."""
        group = self.run("print(open('/proc/self/cgroup').read())").stdout
        return {
            "tier": self.tier,
            "own_user_for_each_program": unused_user_id() is not None,
            "landlock": landlock.version(),
            "memory_group_for_each_program": b"skyrl-sandbox-" in group,
        }

    def may_open(self, file: Path) -> bool:
        """Whether programs can open this file by its name."""
        if self.tier != "bwrap" and (unused_user_id() is None or is_reachable(str(file))):
            return True
        return any(self._may_read(file, path) for path in self._readable if file.is_relative_to(path))

    def _may_read(self, file: Path, root: Path) -> bool:
        """Whether a user may read the path, by the rights of the folders on the way."""
        if unused_user_id() is None:
            return True
        paths = [file, *(parent for parent in file.parents if parent.is_relative_to(root))]
        return all(path.stat().st_mode & mode == mode for path in paths for mode in [0o005 if path.is_dir() else 0o004])

    def close(self) -> None:
        """End the warm interpreter; the next call starts another."""
        self.client.close()


@cache
def shared_sandbox(
    tier: Tier | Literal["auto"], readable: tuple[Path, ...] = (), modules: tuple[str, ...] = ()
) -> Sandbox:
    """The sandbox of this process with these settings."""
    return Sandbox(tier, readable=readable, modules=modules)


class ConfinedProcess:
    """A process, in a folder of its own, that runs until it is closed, with streams that its owner chooses.

    `close` may be called from any thread.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        limits: ResourceLimits,
        streams: Sequence[int],
        *,
        module: str = "",
        command: Command | None = None,
    ) -> None:
        """`streams` are descriptors of its standard input, output and errors, which the caller closes. It runs `main`
        of a module, or a command. `limits.seconds` is not used. Raises `ProcessError`.
        """
        self._client = sandbox.client
        self._folder, self._group = self._client.take(limits.memory_bytes)
        limit_values = asdict(limits) | {"seconds": FOREVER}
        try:
            ends = [streams[0], *streams]  # the first is where a program would be read from
            self._control: socket.socket | None = self._client.fork(
                module, ends, limit_values, self._folder, self._group, command
            )
        except BaseException:
            self._client.give_back(self._folder, self._group)
            raise

    def close(self, patience: float = 0.001) -> str:
        """End the process, and wait until nothing of it is left. Returns how it ended if it had ended by itself or does
        so within `patience` seconds.
        """
        control, self._control = self._control, None
        if control is None:
            return ""
        with control:
            report = receive(control, patience)
            if not report:
                with suppress(OSError):
                    control.shutdown(socket.SHUT_WR)
                receive(control, 10 * GRACE)
        self._client.give_back(self._folder, self._group)
        code = int(report.removeprefix("code: ")) if report and report.startswith("code: ") else -1
        if code > 128:
            return f"signal {code - 128} ended its process"
        return f"its process ended with exit code {code}" if code >= 0 else report or ""


@cache
def strongest_tier() -> Tier:
    """The strongest tier that this machine has."""
    return next((tier for tier in reversed(TIERS) if not why_unavailable(tier)), "process")


@cache
def why_unavailable(tier: Tier) -> str:
    """Reason why this machine lacks the tier; empty if programs really run in it here."""
    if sys.platform != "linux":
        return "sandboxes need Linux"
    if tier == "bwrap" and shutil.which("bwrap") is None:
        return "there is no command 'bwrap'; install bubblewrap"
    client = ForkClient(tier)
    try:
        ran = _run(client, "print('here')", b"", ResourceLimits())
    except ProcessError as error:
        return str(error)
    finally:
        client.close()
    return "" if ran.stdout == b"here\n" else f"a program that prints a word in it ended with {ran.code}"


def why_weaker(tier: Tier) -> str:
    """Reason why `auto` is this tier and none of the stronger ones; empty if it is the strongest."""
    stronger = TIERS[TIERS.index(tier) + 1 :]
    return "; ".join(f"{item!r} does not start here: {why_unavailable(item)}" for item in reversed(stronger))


def _run(client: ForkClient, job: str | Command, stdin: bytes, limits: ResourceLimits, until: int | None = None) -> Ran:
    """Run Python source or a command."""
    program, command = (job, None) if isinstance(job, str) else ("", job)
    folder, group = client.take(limits.memory_bytes)
    files = [_memory_file(program.encode(errors="replace")), _memory_file(stdin)]
    outputs = [os.pipe(), os.pipe()]
    try:
        ends = [*files, *(write for _, write in outputs)]
        control = client.fork("", ends, asdict(limits), folder, group, command)
        for end in ends:
            os.close(end)
        files, outputs = [], [(read, -1) for read, _ in outputs]
        with control, _served(command, control, limits.seconds):
            kept, complete = _read_outputs([read for read, _ in outputs], limits, until)
            code = _await_exit_code(control, limits.seconds + GRACE if complete else 0, until)
    finally:
        for number in [*files, *(end for pair in outputs for end in pair if end >= 0)]:
            os.close(number)
        client.give_back(folder, group)
    if not complete:
        return Ran(ended="output", code=-1, stdout=kept[0], stderr=kept[1])
    ended: Literal["exit", "timeout"] = "timeout" if code == TIMED_OUT else "exit"
    return Ran(ended=ended, code=code, stdout=kept[0], stderr=kept[1])


@contextmanager
def _served(command: Command | None, control: socket.socket, seconds: float) -> Iterator[None]:
    """Forward the network of a command to its service while the block runs; does nothing without one."""
    if command is None or command.service is None:
        yield
        return
    control.settimeout(seconds)
    try:
        message, listeners, _, _ = socket.recv_fds(control, 4096, 1)
    except OSError as error:
        raise ProcessError(f"a sandboxed process could not be started: {error}") from error
    if message != LISTENING:
        reason = message.decode(errors="replace").removeprefix("broken: ") or "its supervisor is gone"
        raise ProcessError(f"a sandboxed process could not be started: {reason}")
    with forwarding(socket.socket(fileno=listeners[0]), command.service):
        yield


def _memory_file(data: bytes) -> int:
    """Descriptor of a file in memory that contains `data`."""
    number = os.memfd_create("skyrl")
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _read_outputs(pipes: Sequence[int], limits: ResourceLimits, until: int | None) -> tuple[list[bytes], bool]:
    """Both outputs, read until they close, time is up or `until` is readable; whether that was within the limit."""
    kept: Mapping[int, bytearray] = {pipe: bytearray() for pipe in pipes}
    deadline = time.monotonic() + limits.seconds + GRACE
    waiting = select.poll()
    for pipe in (*pipes, *(() if until is None else (until,))):
        waiting.register(pipe, select.POLLIN)
    open_ones, complete = len(pipes), True
    while complete and open_ones and (left := deadline - time.monotonic()) > 0:
        for pipe, _ in waiting.poll(left * 1000):
            if pipe == until:
                return [bytes(data) for data in kept.values()], False
            data = os.read(pipe, 65536)
            if not data:
                waiting.unregister(pipe)
                open_ones -= 1
            kept[pipe] += data
            complete = complete and len(kept[pipe]) <= limits.output_bytes
    return [bytes(data[: limits.output_bytes]) for data in kept.values()], complete


def _await_exit_code(control: socket.socket, seconds: float, until: int | None) -> int:
    """The program's exit code, or `TIMED_OUT`. After `seconds`, or when `until` is readable, the supervisor is asked to
    end the program, of which nothing is left afterwards.
    """
    if until is not None:
        waiting = select.poll()
        for number in (control.fileno(), until):
            waiting.register(number, select.POLLIN)
        waiting.poll(seconds * 1000)
        seconds = 0
    report = receive(control, seconds)
    if report is None:
        with suppress(OSError):
            control.shutdown(socket.SHUT_WR)
        report = receive(control, 10 * GRACE) or ""
        return TIMED_OUT
    if report.startswith("broken"):
        raise ProcessError(f"a sandboxed process could not be started: {report.removeprefix('broken: ')}")
    return int(report.removeprefix("code: ")) if report else TIMED_OUT


def receive(control: socket.socket, seconds: float) -> str | None:
    """The supervisor's message; empty if it is gone, None if nothing arrives in time."""
    control.settimeout(max(seconds, 0.001))
    try:
        return control.recv(4096).decode(errors="replace")
    except TimeoutError:
        return None
    except OSError:
        return ""
