"""Names in a folder that all machines mount: AReaL's name resolution of type `nfs`."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from skyrl.errors import ProcessError
from skyrl.processes.names import Entry

_SUFFIX = ".name"


class NamesOnDisk:
    """A file for each name. Its time of change says when it was renewed, by the clock of the disk, not of a machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, entry: Entry, seconds: float) -> bool:
        with self._reported():
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            scratch = self._scratch()
            scratch.write_text(json.dumps({"value": entry.value, "owner": entry.owner, "seconds": seconds}))
            try:
                return self._linked(scratch, self._file(name)) or (
                    self._set_aside_if_dead(name) and self._linked(scratch, self._file(name))
                )
            finally:
                scratch.unlink()

    def renew(self, name: str, entry: Entry, seconds: float) -> bool:
        with self._reported():
            found = self._read(self._file(name))
            if found is None or found[0].owner != entry.owner or self._age(self._file(name)) > found[1]:
                return False
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._file(name))
                return True
            return False

    def remove(self, name: str, owner: str) -> None:
        with self._reported():
            found = self._read(self._file(name))
            if found is not None and found[0].owner == owner:
                self._file(name).unlink(missing_ok=True)

    def find(self, prefix: str) -> Mapping[str, str]:
        with self._reported():
            names = sorted(unquote(file.name.removesuffix(_SUFFIX)) for file in self._folder.glob(f"*{_SUFFIX}"))
            found = {name: self.get(name) for name in names if name.startswith(prefix)}
            return {name: value for name, value in found.items() if value is not None}

    def get(self, name: str) -> str | None:
        with self._reported():
            file = self._file(name)
            found = self._read(file)
            return None if found is None or self._age(file) > found[1] else found[0].value

    def _file(self, name: str) -> Path:
        return self._folder / f"{quote(name, safe='')}{_SUFFIX}"

    def _scratch(self) -> Path:
        return self._folder / f".{secrets.token_hex(8)}"

    def _linked(self, scratch: Path, file: Path) -> bool:
        """Put the file there, unless there is one; one step, on NFS, too."""
        try:
            os.link(scratch, file)
        except FileExistsError:
            return False
        return True

    def _set_aside_if_dead(self, name: str) -> bool:
        """Remove a name whose lease is over. One that somebody published anew meanwhile is put back."""
        file, aside = self._file(name), self._scratch()
        found = self._read(file)
        if found is None:
            return True
        if self._age(file) <= found[1]:
            return False
        with contextlib.suppress(FileNotFoundError):
            os.rename(file, aside)
            taken = self._read(aside)
            if taken is not None and taken[0].owner != found[0].owner:
                self._linked(aside, file)
            aside.unlink()
        return True

    def _read(self, file: Path) -> tuple[Entry, float] | None:
        """The entry and the seconds of its lease; None where there is no such file, or none that is whole."""
        try:
            found = json.loads(file.read_text())
            return Entry(found["value"], found["owner"]), float(found["seconds"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _age(self, file: Path) -> float:
        """Seconds since the file was renewed, by the clock of its disk; infinite for one that is gone."""
        scratch = self._scratch()
        scratch.touch()
        try:
            return scratch.stat().st_mtime - file.stat().st_mtime
        except FileNotFoundError:
            return float("inf")
        finally:
            scratch.unlink()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ProcessError(f"names in {self._folder} cannot be read or written: {error.strerror}") from None
