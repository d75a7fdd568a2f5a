"""Output of launches, read as it grows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from skyrl.launchers.job import LOGS, Launch, Launcher
from skyrl.launchers.ray import RayLauncher

_EVERY = 1.0


class Output:
    """The output of one launch: files of its folder, or the log of Ray's dashboard."""

    def __init__(self, launch: Launch, launcher: Launcher) -> None:
        self._launch, self._launcher = launch, launcher
        self._read: dict[Path, int] = {}
        self._letters = 0

    def new(self) -> str:
        """Everything printed since the last call."""
        if isinstance(self._launcher, RayLauncher):
            text = self._launcher.logs(self._launch)
            fresh, self._letters = text[self._letters :], len(text)
            return fresh
        files = sorted((self._launch.folder / LOGS).glob("*.log"))
        parts = [(file, self._rest(file)) for file in files]
        several = len(files) > 1
        return "".join(f"==> {file.name} <==\n{text}" if several else text for file, text in parts if text)

    def follow(self) -> Iterator[str]:
        """New output again and again, until the launch has ended."""
        waiting = threading.Event()
        while True:
            state = self._launcher.state(self._launch)
            yield self.new()
            if not state.startswith(("waiting", "starting", "running", "ending")):
                return
            waiting.wait(_EVERY)

    def _rest(self, file: Path) -> str:
        with file.open("rb") as stream:
            stream.seek(self._read.get(file, 0))
            data = stream.read()
            self._read[file] = stream.tell()
        return data.decode(errors="replace")
