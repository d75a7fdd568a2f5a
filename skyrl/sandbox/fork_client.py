"""Client of the fork server (`fork_server.py`): asks it for processes."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from attrs import frozen

from skyrl.errors import ProcessError
from skyrl.sandbox import fork_server
from skyrl.sandbox.folders import remove_tree
from skyrl.sandbox.memory_groups import MemoryGroup, MemoryGroups, sweep
from skyrl.sandbox.tiers import Tier, bubblewrap, has_namespaces, needed_by_python

START_SECONDS = 60.0
"""Seconds for a server to import its modules, on a busy machine too."""

_ROOT = Path(__file__).parents[2]
_BEGIN = "import sys; sys.path.insert(0, sys.argv[1]); from skyrl.sandbox import fork_server; fork_server.main()"
_OURS = (
    "__init__.py",
    *(f"sandbox/{name}.py" for name in ("__init__", "fork_server", "confinement", "landlock", "system_calls")),
)
"""Files of skyrl that the server reads."""


@frozen(kw_only=True)
class Command:
    """A program of any kind, without a network or, in a network namespace, with one service."""

    arguments: tuple[str, ...]
    """Program and arguments."""

    environment: Mapping[str, str]
    """Environment variables. HOME and TMPDIR are added, with the folder in which the program starts."""

    service: tuple[str, int] | None = None
    """Host and port that connections to 127.0.0.1:`SERVICE_PORT` in its namespace are forwarded to. None: it has no
    network."""


class ForkClient:
    """One fork server, started when it is first needed and again if it is gone. Safe to use from several threads."""

    def __init__(self, tier: Tier, readable: Sequence[Path] = (), modules: Sequence[str] = ()) -> None:
        """`modules` are imported in every process, which then finds the packages of this one; without any, processes
        have the standard library alone.
        """
        self._tier, self._modules = tier, tuple(modules)
        self._readable = [str(path) for path in readable]
        self._start_lock = Lock()
        self._owner = -1
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self.groups = MemoryGroups()
        """Control groups for the programs of this server."""

    @property
    def folder(self) -> str:
        """Path at which each process in namespaces sees its own folder; other processes have theirs inside it."""
        self._expect()
        return self._folder

    def take(self, memory_bytes: int) -> tuple[str, MemoryGroup | None]:
        """A folder and a control group for one process, to be given back. In namespaces the folder is a mount point
        for memory, the same for all, otherwise a new one on disk.
        """
        folder = self.folder if has_namespaces(self._tier) else tempfile.mkdtemp(dir=self.folder)
        return folder, self.groups.take(memory_bytes)

    def give_back(self, folder: str, group: MemoryGroup | None) -> None:
        """Take back the folder and the group of a process that has ended completely."""
        self.groups.give_back(group)
        if not has_namespaces(self._tier):
            remove_tree(folder)

    def fork(
        self,
        module: str,
        files: Sequence[int],
        limits: Mapping[str, float],
        folder: str,
        group: MemoryGroup | None = None,
        command: Command | None = None,
    ) -> socket.socket:
        """Start a process that runs the program in `files[0]`, or calls `main` of `module` if that is given; the other
        files are its standard input, output and errors. On the returned socket, the supervisor reports how it ended;
        closing the socket ends it. `group` limits the memory of all its processes. A `command` replaces the program;
        if it has a service, the first message contains the socket that listens in its network namespace.

        Raises `ProcessError` if there is no server.
        """
        client_socket, supervisor_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request_fields: dict[str, object] = {"module": module, "limits": dict(limits), "folder": folder}
        request_fields |= {"group": group is not None, "command": command.arguments if command else ()}
        request_fields["service"] = command is not None and command.service is not None
        request_fields["environment"] = dict(command.environment) if command else {}
        request, grouped = json.dumps(request_fields).encode(), [] if group is None else [group.descriptor]
        if len(request) > fork_server.LONGEST_REQUEST:
            raise ProcessError(f"a command and its environment have more than {fork_server.LONGEST_REQUEST} bytes")
        with supervisor_socket:
            for _ in range(2):
                server = self._expect()
                try:
                    socket.send_fds(server, [request], [*files, *grouped, supervisor_socket.fileno()])
                    return client_socket
                except OSError:
                    self._forget(server)
        client_socket.close()
        raise ProcessError(f"the fork server of the sandbox tier {self._tier!r} does not stay alive")

    def close(self) -> None:
        """End the server and all its processes."""
        with self._start_lock:
            if self._owner == os.getpid():
                self._end()
                with suppress(OSError):
                    for name in os.listdir(self._folder):  # each has an owner of its own
                        remove_tree(os.path.join(self._folder, name))
                    os.rmdir(self._folder)
                self._folder = ""
                atexit.unregister(self.close)
                self.groups.close()

    def _expect(self) -> socket.socket:
        with self._start_lock:
            if self._socket is None or self._owner != os.getpid():
                self._start()
            assert self._socket is not None, "it was just started"
            return self._socket

    def _forget(self, server: socket.socket) -> None:
        with self._start_lock:
            if self._socket is server:
                self._end()

    def _end(self) -> None:
        server, process, self._socket, self._process = self._socket, self._process, None, None
        if server is not None:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        if process is not None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        if self._owner != os.getpid() or not self._folder:
            sweep()
            self._socket = self._process = None  # those of the process that this one was forked from
            self._folder, self._owner = tempfile.mkdtemp(prefix="skyrl-sandbox-"), os.getpid()
            atexit.register(self.close)  # removes the folder, whether or not a server starts
        os.chmod(self._folder, 0o755)  # for the users of processes, who mount or have folders of their own there
        client_socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_socket, tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                self._command(),
                stdin=server_socket.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
            server_socket.close()
            self._socket = client_socket
            client_socket.settimeout(START_SECONDS)
            try:
                ready = client_socket.recv(64) == fork_server.READY
            except OSError:
                ready = False
            client_socket.settimeout(None)
            if not ready:
                self._end()
                errors.seek(0)
                output = errors.read().decode(errors="replace").strip()[-500:]
                raise ProcessError(f"the fork server of the sandbox tier {self._tier!r} does not start: {output}")

    def _command(self) -> list[str]:
        readable = [*self._readable, *needed_by_python()]
        if self._modules:
            readable += [path for path in sys.path if path]
        settings = {
            "namespaces": has_namespaces(self._tier),
            "paths": [os.path.abspath(path) for path in sys.path] if self._modules else [],
            "modules": self._modules,
            "readable": readable if self._tier == "bwrap" else [*readable, self._folder],
        }
        isolated = ["-I"] if self._modules else ["-I", "-S"]
        python = [sys.executable, *isolated, "-c", _BEGIN, str(_ROOT), json.dumps(settings)]
        if self._tier != "bwrap":
            return python
        return [*bubblewrap(self._folder, [*readable, *(str(_ROOT / "skyrl" / name) for name in _OURS)]), *python]
