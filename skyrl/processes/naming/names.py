"""Names of services, by which processes that start elsewhere find each other: AReaL's name resolution.

    with Published(store, "judge", "http://10.0.0.7:8001/score"):     # renewed until the block ends
        ...
    wait_for(store, "judge", seconds=60)                            # in another process

A name has a lease, which its owner renews. A name that is not renewed in time disappears, so that lookups never return
the address of a dead process. A name belongs to one owner; a second is refused as long as the first is alive.
`run_under_a_name` runs a server and publishes its address while it runs: `skyrl publish`.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, Self
from urllib.parse import urlsplit

from attrs import frozen

from skyrl.errors import ProcessError, UserError
from skyrl.processes.addresses import why_unreachable

LEASE_SECONDS = 30.0
"""Seconds that a name lives without being renewed."""

_POLL_SECONDS = 0.2


@frozen
class Entry:
    """A name's value, and the mark of the owner that published it."""

    value: str
    owner: str


class NameStore(Protocol):
    """A store of names. Every method raises `ProcessError` if the store cannot be reached."""

    def add(self, name: str, entry: Entry, seconds: float) -> bool:
        """Publish a name with a lease of `seconds`. False if the name has a living owner."""

    def renew(self, name: str, entry: Entry, seconds: float) -> bool:
        """Renew a lease, with the same length as in `add`. False if the name no longer belongs to this owner."""

    def remove(self, name: str, owner: str) -> None:
        """Withdraw the name, if it belongs to this owner."""

    def find(self, prefix: str) -> Mapping[str, str]:
        """Every living name with this prefix, and its value."""

    def get(self, name: str) -> str | None:
        """The value of a living name; None if there is none."""


class Published:
    """A name that is renewed in the background until the block ends. Raises `ProcessError` if it is taken.

    `lost` is set when another owner has the name, which happens only if this process could not renew it in time.
    """

    def __init__(self, store: NameStore, name: str, value: str, seconds: float = LEASE_SECONDS) -> None:
        self._store, self._name, self._seconds = store, name, seconds
        self._entry = Entry(value, secrets.token_hex(8))
        self._ended = threading.Event()
        self.lost = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"skyrl-name-{name}", daemon=True)

    def __enter__(self) -> Self:
        if not self._store.add(self._name, self._entry, self._seconds):
            holder = self._store.get(self._name) or "a process that is ending"
            raise ProcessError(
                f"The name {self._name} is taken by {holder}: choose another name, or stop that process. The name of a "
                f"dead process is released {self._seconds:g} s after its death"
            )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(ProcessError):  # it ends with its lease
            self._store.remove(self._name, self._entry.owner)

    def _renew(self) -> None:
        """Renew the name until the block ends. A store that cannot be reached is tried again: it may be restarted, and
        the name is then published again.
        """
        while not self._ended.wait(self._seconds / 3):
            try:
                kept = self._store.renew(self._name, self._entry, self._seconds)
                if not kept and not self._store.add(self._name, self._entry, self._seconds):
                    self.lost.set()
                    return
            except ProcessError:
                continue


def wait_for(store: NameStore, name: str, seconds: float) -> str:
    """Wait for a name to be published, and return its value. A store that cannot be reached is tried again. Raises
    `ProcessError` after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = store.get(name)
        except ProcessError:
            if time.monotonic() >= deadline:
                raise
            value = None
        if value is not None:
            return value
        if time.monotonic() >= deadline:
            raise ProcessError(
                f"No server is published under the name {name} within {seconds:g} s: is that service running?"
            )
        time.sleep(_POLL_SECONDS)


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
        while process.poll() is None and why_unreachable(parsed_url.hostname, parsed_url.port, 1) is not None:
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


@contextlib.contextmanager
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
