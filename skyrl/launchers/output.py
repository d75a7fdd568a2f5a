"""Output of launches, read as it grows."""

from __future__ import annotations

import codecs
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from skyrl.errors import UserError
from skyrl.launchers.job import LOGS, Launch, Launcher
from skyrl.launchers.ray import RayLauncher
from skyrl.tree.files import MOST_STORED, open_stored

_EVERY = 1.0


class LaunchOutput:
    """The output of one launch: files of its folder, or the log of Ray's dashboard."""

    def __init__(self, launch: Launch, launcher: Launcher) -> None:
        self._launch, self._launcher = launch, launcher
        self._read: dict[Path, int] = {}
        self._decoders: dict[Path, codecs.IncrementalDecoder] = {}
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
        """Text appended to a file since the last call: at most its last `MOST_STORED` bytes."""
        if file not in self._decoders:  # a letter may be written in two parts
            self._decoders[file] = codecs.getincrementaldecoder("utf-8")(errors="replace")
        try:
            with open_stored(file) as stream:
                start, end = self._read.get(file, 0), stream.seek(0, os.SEEK_END)
                left_out = max(end - start - MOST_STORED, 0)
                stream.seek(start + left_out)
                data = stream.read(MOST_STORED)
                self._read[file] = stream.tell()
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {error}") from None
        text = self._decoders[file].decode(data)
        return f"({left_out} bytes are left out: see {file})\n{text}" if left_out else text
