"""Commands in a sandbox: a network of their own, which leads to one service, and every limit that programs have."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Thread

import psutil
import pytest

from skyrl.errors import ProcessError
from skyrl.sandbox.fork_client import Command
from skyrl.sandbox.fork_server import SERVICE_PORT
from skyrl.sandbox.forwarding import MOST_CONNECTIONS, forwarding
from skyrl.sandbox.sandbox import Ran, ResourceLimits, Sandbox
from skyrl.sandbox.tiers import TIERS, has_namespaces
from tests.processes.clusters import soon
from tests.processes.left_over import process_beside
from tests.sandbox.attacks import ALL_ESCAPES, HERE
from tests.sandbox.escapes import TWICE, is_open
from tests.sandbox.test_attacks import every_tenth, neighbour

NETWORKED = [tier for tier in HERE if has_namespaces(tier)]
LIMITS = ResourceLimits(seconds=30.0, open_files=256)

ASKS = f"import socket\ns = socket.create_connection(('127.0.0.1', {SERVICE_PORT}), 5)\ns.sendall(b'hello')\n"


@pytest.fixture(params=NETWORKED, scope="module")
def sandbox(request: pytest.FixtureRequest, closed: Path) -> Iterator[Sandbox]:
    """A sandbox of each tier that has networks."""
    sandbox = Sandbox(request.param, readable=[closed / "open"])
    yield sandbox
    sandbox.close()


class Echo:
    """A service on every address of this machine that sends back what it is told."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("0.0.0.0", 0))
        self.port: int = self.listener.getsockname()[1]
        self.open: set[socket.socket] = set()
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.open.add(connection)
            Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while piece := connection.recv(1 << 16):
                connection.sendall(piece)
        self.open.discard(connection)


@pytest.fixture
def echo() -> Iterator[Echo]:
    served = Echo()
    yield served
    served.listener.close()


def run(sandbox: Sandbox, program: str, port: int, stdin: bytes = b"") -> Ran:
    """The result of a Python program as a command."""
    arguments = (sys.executable, "-I", "-S", "-c", program)
    command = Command(arguments=arguments, environment={"PATH": "/usr/bin:/bin"}, service=("127.0.0.1", port))
    return sandbox.run_command(command, stdin, LIMITS)


def test_a_command_reaches_its_service(sandbox: Sandbox, echo: Echo) -> None:
    ran = run(sandbox, ASKS + "print(s.recv(100).decode(), input())", echo.port, b"task\n")
    assert (ran.ended, ran.code, ran.stdout) == ("exit", 0, b"hello task\n"), ran


def test_a_command_exchanges_more_than_any_buffer_holds(sandbox: Sandbox, echo: Echo) -> None:
    program = (
        ASKS + "import threading\nsent = b'0123456789' * 400_000\n"
        "threading.Thread(target=lambda: (s.sendall(sent), s.shutdown(socket.SHUT_WR))).start()\n"
        "got = b''.join(iter(lambda: s.recv(65536), b''))\nprint(got == b'hello' + sent)"
    )
    ran = run(sandbox, program, echo.port)
    assert ran.stdout == b"True\n", ran


ELSEWHERE = {"the service's own port": "127.0.0.1", "loopback by another name": "127.0.0.2"} | {
    f"this machine's {name}": address.address
    for name, addresses in psutil.net_if_addrs().items()
    for address in addresses
    if address.family == socket.AF_INET and not address.address.startswith("127.")
}
CONNECTS = (
    "import socket\ntry:\n  socket.create_connection({}, 5)\n  print('reached')\nexcept OSError: print('refused')"
)


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_command_reaches_nothing_but_its_service(where: str, sandbox: Sandbox, echo: Echo) -> None:
    address = ELSEWHERE[where]
    socket.create_connection((address, echo.port), 5).close()  # who is not in the sandbox reaches it
    ran = run(sandbox, CONNECTS.format((address, echo.port)), echo.port)
    assert ran.stdout == b"refused\n", ran


def test_host_names_and_datagrams_do_not_leave_the_sandbox(sandbox: Sandbox, echo: Echo) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        address = receiver.getsockname()
        program = (
            f"import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nprint(s.sendto(b'x', {address!r}))\n"
            "try: socket.getaddrinfo('example.com', 80)\nexcept OSError: print('no name')\n"
            "for family in (socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):\n"
            "  try: socket.socket(family, socket.SOCK_RAW)\n  except OSError: print('refused')\n"
        )
        ran = run(sandbox, program, echo.port)
        assert ran.stdout.split() == [b"1", b"no", b"name", b"refused", b"refused", b"refused"], ran
        with pytest.raises(BlockingIOError):
            receiver.recv(1)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
            ours.sendto(b"x", address)
        assert soon(lambda: receiver.recv(1) == b"x")


def test_connections_of_a_command_are_limited_and_end_with_it(sandbox: Sandbox, echo: Echo) -> None:
    program = (
        ASKS + "held = [s]\n"
        f"for _ in range({MOST_CONNECTIONS + 9}):\n"
        f"  c = socket.create_connection(('127.0.0.1', {SERVICE_PORT}), 5)\n  c.sendall(b'x')\n  held.append(c)\n"
        "def answers(c):\n  try: return bool(c.recv(1))\n  except OSError: return False\n"
        "print(sum(map(answers, held)))"
    )
    ran = run(sandbox, program, echo.port)
    assert ran.stdout == f"{MOST_CONNECTIONS}\n".encode(), ran
    assert soon(lambda: not echo.open)


def test_two_commands_have_networks_of_their_own(sandbox: Sandbox, echo: Echo) -> None:
    listens = "import socket\nheld = socket.create_server(('127.0.0.1', 9000))\n"
    connects = CONNECTS.format("('127.0.0.1', 9000)")
    assert run(sandbox, listens + connects, echo.port).stdout == b"reached\n"
    neighbour_program = listens + "import time\nopen('neighbour', 'w').close()\ntime.sleep(1000)"
    thread = Thread(target=run, args=(sandbox, neighbour_program, echo.port))
    thread.start()
    assert soon(lambda: process_beside("neighbour") is not None)
    assert run(sandbox, connects, echo.port).stdout == b"refused\n"
    listening = process_beside("neighbour")
    assert listening is not None
    listening.kill()
    thread.join()


def test_processes_that_a_command_starts_end_with_it(sandbox: Sandbox, echo: Echo) -> None:
    marker = "a-child-of-a-command-left-behind"
    child = f"import time; {marker!r}; time.sleep(1000)"
    program = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-I', '-S', '-c', {child!r}], start_new_session=True)\nprint('started')"
    )
    assert run(sandbox, program, echo.port).stdout == b"started\n"
    left = [process for process in psutil.process_iter(["cmdline"]) if child in (process.info["cmdline"] or [])]
    assert left == []


def test_a_tier_without_networks_runs_no_command(echo: Echo) -> None:
    with pytest.raises(ProcessError, match="no network of its own"):
        run(Sandbox("process"), "print('ran')", echo.port)


def test_a_missing_command_fails(sandbox: Sandbox, echo: Echo) -> None:
    command = Command(arguments=("/no/such/program",), environment={}, service=("127.0.0.1", echo.port))
    ran = sandbox.run_command(command, limits=LIMITS)
    assert ran.code == 1 and b"FileNotFoundError" in ran.stderr, ran


ARRIVES_NOWHERE = "a datagram to loopback"
"""Sent in the command's own network, as `test_host_names_and_datagrams_do_not_leave_the_sandbox` shows."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("escape", every_tenth(escape for escape in ALL_ESCAPES if escape != ARRIVES_NOWHERE))
def test_a_command_has_the_limits_of_a_program(
    escape: str, sandbox: Sandbox, echo: Echo, stands_for: dict[str, str]
) -> None:
    program, verdicts = ALL_ESCAPES[escape]
    for name, value in stands_for.items():
        program = program.replace(name, value)
    with neighbour(sandbox) if "neighbour" in program else nullcontext():
        for _ in range(2 if escape in TWICE else 1):
            ran = run(sandbox, program, echo.port)
    verdict = verdicts[TIERS.index(sandbox.tier)]
    open_here = is_open(verdict, sandbox.record())
    assert (b"escaped" in ran.stdout) == open_here, ran


def test_forwarding_that_cannot_begin_says_so_instead_of_waiting() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as no_listener,
        pytest.raises(ProcessError, match="could not be forwarded"),
        forwarding(no_listener, ("127.0.0.1", 1)),
    ):
        pass
