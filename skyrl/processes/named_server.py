"""A server of others that has a name for as long as it runs."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from skyrl.errors import ProcessError, UserError
from skyrl.processes.names import LEASE_SECONDS, NameStore, Published

_POLL_SECONDS = 0.2


def run_under_a_name(
    store: NameStore,
    name: str,
    url: str,
    command: Sequence[str],
    *,
    start_seconds: float,
    say: Callable[[str], None],
    lease: float = LEASE_SECONDS,
) -> int:
    """The exit code of the command, whose address has the name from when it takes connections until it ends. SIGINT and
    SIGTERM are handed on to it.

    Raises `UserError` for an address without a port or a command that is not there, and `ProcessError` for a server
    that takes no connections within `start_seconds`, or whose name is another's: then it is ended.
    """
    place = urlsplit(url)
    if place.scheme not in ("http", "https") or place.hostname is None or place.port is None:
        raise UserError(f"{url} is no address of a server: write http://HOST:PORT")
    with _running(command) as process:
        deadline = time.monotonic() + start_seconds
        while process.poll() is None and not _takes_connections(place.hostname, place.port):
            if time.monotonic() > deadline:
                raise ProcessError(f"{command[0]} takes no connections at {url} after {start_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        if process.poll() is None:
            with Published(store, name, url, lease) as published:
                say(f"published as name:{name}")
                while process.poll() is None:
                    if published.lost.wait(_POLL_SECONDS):
                        raise ProcessError(f"the name {name} is another's now: its lease could not be renewed in time")
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own, which has ended when the block has."""
    try:
        process = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {error.strerror}") from error
    kept = {each: signal.signal(each, lambda number, _: _hand_on(process, number)) for each in _HANDED_ON}
    try:
        yield process
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_HANDED_ON = (signal.SIGINT, signal.SIGTERM)


def _hand_on(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)


def _takes_connections(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port), 1).close()
        return True
    return False
