"""Runs a server and publishes its address under a name while it runs: `skyrl publish`."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from skyrl.errors import ProcessError, UserError
from skyrl.processes.addresses import why_unreachable
from skyrl.processes.naming.names import NameStore, Published

_POLL_SECONDS = 0.2


def run_under_a_name(
    store: NameStore,
    name: str,
    url: str,
    command: Sequence[str],
    *,
    start_seconds: float,
    say: Callable[[str], None],
) -> int:
    """Run the command, publish `url` under the name from its first accepted connection until it ends, and return its
    exit code (128 + N if signal N ended it). SIGINT and SIGTERM are forwarded to it.

    Raises `UserError` for an address without a port or a command that cannot be started. Raises `ProcessError`, and
    ends the command, if it accepts no connection within `start_seconds` or if the name belongs to another owner.
    """
    parsed_url = urlsplit(url)
    if parsed_url.scheme not in ("http", "https") or parsed_url.hostname is None or parsed_url.port is None:
        raise UserError(f"{url} is not the address of a server: write http://HOST:PORT")
    with _running(command) as process:
        deadline = time.monotonic() + start_seconds
        while process.poll() is None and why_unreachable(parsed_url.hostname, parsed_url.port, 1):
            if time.monotonic() > deadline:
                raise ProcessError(f"{command[0]} accepted no connection at {url} within {start_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        if process.poll() is not None:
            say(f"{command[0]} ended before it accepted a connection at {url}, with exit code {_code(process.wait())}")
        else:
            with Published(store, name, url) as published:
                say(f"published as name:{name}")
                while process.poll() is None:
                    if published.lost.wait(_POLL_SECONDS):
                        raise ProcessError(f"the name {name} has another owner: its lease was not renewed in time")
        return _code(process.wait())


def _code(returned: int) -> int:
    """Exit code as shells give it: 128 + N for a process that signal N ended."""
    return returned if returned >= 0 else 128 - returned


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process in its own session; it has ended when the block exits."""
    try:
        process = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {error.strerror}") from error
    forwarded = (signal.SIGINT, signal.SIGTERM)
    kept = {item: signal.signal(item, lambda number, _: process.send_signal(number)) for item in forwarded}
    try:
        yield process
    finally:
        for entry, handler in kept.items():
            signal.signal(entry, handler)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
