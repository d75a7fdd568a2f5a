"""`skyrl publish`: a server has a name from when it takes connections until it ends, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.errors import ProcessError, UserError
from skyrl.processes.naming.names import Published, run_under_a_name
from skyrl.processes.naming.names_on_disk import NamesOnDisk

SERVES = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        server.accept()[0].close()
"""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def publishing(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """The command, once it has published engines/0."""
    words = [sys.executable, "-m", "skyrl.cli", "publish", "engines/0", f"http://127.0.0.1:{port}", "--"]
    words += [sys.executable, "-c", SERVES, str(port)]
    environment = os.environ | {"SKYRL_NAMES": f"nfs:{folder}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "published as name:engines/0\n"
        yield process
        process.kill()


def test_a_server_has_its_name_until_it_dies(tmp_path: Path) -> None:
    store, port = NamesOnDisk(tmp_path), free_port()
    with publishing(tmp_path, port) as process:
        assert store.get("engines/0") == f"http://127.0.0.1:{port}"
        (server,) = psutil.Process(process.pid).children()
        server.kill()
        assert process.wait(60) == 128 + signal.SIGKILL
    assert store.get("engines/0") is None


def test_a_server_is_ended_with_its_command(tmp_path: Path) -> None:
    with publishing(tmp_path, free_port()) as process:
        (server,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert not server.is_running()
    assert NamesOnDisk(tmp_path).get("engines/0") is None


def test_a_server_whose_name_is_taken_is_ended(tmp_path: Path) -> None:
    store, port = NamesOnDisk(tmp_path), free_port()
    messages: list[str] = []
    command = [sys.executable, "-c", SERVES, str(port)]
    with Published(store, "engines/0", "http://other:1"), pytest.raises(ProcessError, match="taken by http://other:1"):
        run_under_a_name(store, "engines/0", f"http://127.0.0.1:{port}", command, start_seconds=60, say=messages.append)
    assert messages == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)


def test_a_server_that_accepts_no_connections_is_reported_and_ended(tmp_path: Path, closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    command = [sys.executable, "-c", "import signal; signal.pause()", str(tmp_path)]
    with pytest.raises(ProcessError, match=f"accepted no connection at {url} within 0.1 s"):
        run_under_a_name(NamesOnDisk(tmp_path), "a", url, command, start_seconds=0.1, say=print)
    assert [
        process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in (process.info["cmdline"] or ())
    ] == []


def test_a_server_that_ends_before_it_accepts_connections_is_reported(tmp_path: Path, closed_port: int) -> None:
    store, url, messages = NamesOnDisk(tmp_path), f"http://127.0.0.1:{closed_port}", list[str]()
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    assert run_under_a_name(store, "a", url, command, start_seconds=60, say=messages.append) == 3
    assert messages == [f"{sys.executable} ended before it accepted a connection at {url}, with exit code 3"]
    assert store.find("") == {}


@pytest.mark.parametrize(
    ("url", "command", "message"),
    [
        ("10.0.0.7:8000", "true", "10.0.0.7:8000 is not the address of a server"),
        ("http://10.0.0.7", "true", "http://10.0.0.7 is not the address of a server"),
        ("http://10.0.0.7:8000", "no-such-program", "no-such-program cannot be started: No such file"),
    ],
)
def test_what_cannot_be_published_is_refused(tmp_path: Path, url: str, command: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_under_a_name(NamesOnDisk(tmp_path), "a", url, [command], start_seconds=1, say=print)


def test_a_name_needs_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYRL_NAMES", raising=False)
    result = CliRunner().invoke(cli, ["publish", "a", "http://127.0.0.1:1", "--", "true"])
    assert isinstance(result.exception, UserError) or "needs a name store" in result.output
