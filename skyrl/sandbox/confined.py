"""A confined process that runs until it is closed, with streams that its owner chooses.

`worker.py` speaks to a module of skyrl over one, and MCP servers are commands over one.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from attrs import asdict

from skyrl.sandbox.folders import folder_of, remove_folder
from skyrl.sandbox.fork_client import Command
from skyrl.sandbox.sandbox import GRACE, ResourceLimits, Sandbox, receive

_FOREVER = 10**6


class ConfinedProcess:
    """One process, in a folder of its own. `close` may be called from any thread."""

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
        self._tier = sandbox.tier
        self._folder = folder_of(sandbox.client.folder, sandbox.tier)
        self._groups = sandbox.client.groups
        self._group = self._groups.take(limits.memory_bytes)
        limit_values = asdict(limits) | {"seconds": _FOREVER}
        try:
            ends = [streams[0], *streams]  # the first is where a program would be read from
            self._control: socket.socket | None = sandbox.client.fork(
                module, ends, limit_values, self._folder, self._group, command
            )
        except BaseException:
            self._groups.give_back(self._group)
            remove_folder(self._folder, self._tier)
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
        self._groups.give_back(self._group)
        remove_folder(self._folder, self._tier)
        return _describe_end(report or "")


def _describe_end(report: str) -> str:
    code = int(report.removeprefix("code: ")) if report.startswith("code: ") else -1
    if code > 128:
        return f"signal {code - 128} ended its process"
    return f"its process ended with exit code {code}" if code >= 0 else report
