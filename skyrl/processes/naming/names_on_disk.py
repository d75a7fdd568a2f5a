"""Names in a folder that all machines mount: AReaL's name resolution of type `nfs`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote, unquote

from attrs import frozen

from skyrl.errors import ProcessError
from skyrl.processes.naming.names import Entry
from skyrl.processes.private_folder import make_own_folder, refuse_a_strangers

_SUFFIX = ".name"
_LONGEST = 150
"""Largest number of bytes of a name in the name of its file; with a digest and the suffix, Linux allows 255."""


@frozen
class _Lease:
    """A published name, as read from its file."""

    name: str
    entry: Entry
    seconds: float
    """Seconds that the name lives without being renewed."""

    age: float
    """Seconds since it was renewed."""

    @property
    def is_alive(self) -> bool:
        return self.age <= self.seconds


class NamesOnDisk:
    """Name store with a file for each name. The file's modification time says when the name was renewed, by the clock
    of the disk, not of a machine.

    A process that publishes, renews or withdraws a name holds the folder's lock, so that only one of several processes
    that find an owner dead gets the name. Nothing is read or written in a folder of another user's, who could give a
    name any address.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, entry: Entry, seconds: float) -> bool:
        with self._reported(), self._locked():
            lease = self._read_lease(self._file(name))
            if lease is not None and lease.is_alive:
                return False
            scratch = self._scratch()
            try:
                about = {"name": name, "value": entry.value, "owner": entry.owner, "seconds": seconds}
                scratch.write_text(json.dumps(about))
                scratch.replace(self._file(name))
            finally:
                scratch.unlink(missing_ok=True)
            return True

    def renew(self, name: str, entry: Entry, seconds: float) -> bool:
        with self._reported(), self._locked():
            lease = self._read_lease(self._file(name))
            if lease is None or lease.entry.owner != entry.owner or not lease.is_alive:
                return False
            os.utime(self._file(name))
            return True

    def remove(self, name: str, owner: str) -> None:
        with self._reported(), self._locked():
            lease = self._read_lease(self._file(name))
            if lease is not None and lease.entry.owner == owner:
                self._file(name).unlink()

    def find(self, prefix: str) -> Mapping[str, str]:
        with self._reported():
            read = (self._read_lease(file) for file in self._folder.glob(f"*{_SUFFIX}"))
            values = {item.name: item.entry.value for item in read if item is not None and item.is_alive}
            return {name: values[name] for name in sorted(values) if name.startswith(prefix)}

    def get(self, name: str) -> str | None:
        with self._reported():
            lease = self._read_lease(self._file(name))
            return lease.entry.value if lease is not None and lease.is_alive else None

    def _file(self, name: str) -> Path:
        quoted = quote(name, safe="")
        if len(quoted) > _LONGEST:  # the file itself holds the name
            quoted = f"{quoted[:_LONGEST]}-{sha256(name.encode()).hexdigest()}"
        return self._folder / f"{quoted}{_SUFFIX}"

    def _scratch(self) -> Path:
        return self._folder / f".{secrets.token_hex(8)}"

    def _read_lease(self, file: Path) -> _Lease | None:
        """The lease in a file, with its age read from the same open file, which may be replaced meanwhile. None if the
        file does not exist or is incomplete.
        """
        try:
            with file.open(encoding="utf-8") as opened:
                content = json.load(opened)
                age = self._now() - os.fstat(opened.fileno()).st_mtime
            name = content.get("name", unquote(file.name.removesuffix(_SUFFIX)))
            return _Lease(name, Entry(content["value"], content["owner"]), float(content["seconds"]), age)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _now(self) -> float:
        """The time by the clock of the folder's disk."""
        scratch = self._scratch()
        scratch.touch()
        try:
            return scratch.stat().st_mtime
        finally:
            scratch.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, which ends with its process and works across machines that mount it by NFS."""
        make_own_folder(self._folder, 0o700)
        with (self._folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            with contextlib.suppress(FileNotFoundError):
                refuse_a_strangers(self._folder)
            yield
        except OSError as error:
            raise ProcessError(f"names in {self._folder} cannot be read or written: {error.strerror}") from None
