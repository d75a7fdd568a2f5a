"""Every state of a folder in which a process could be killed while it changes files there.

What a killed process leaves is what its system calls had done. So one run of a writer that is never killed shows all of
it: the content before each change of a file or folder, and each file as its opening for writing leaves it, empty.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

State = dict[str, bytes | None]
"""Content of each file by its path relative to the folder, and None for each folder."""

_CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
_watched: list[tuple[Path, list[State]]] = []
_installed: list[bool] = []
_looking = threading.local()


@contextmanager
def states_of(folder: Path) -> Iterator[list[State]]:
    """The states so far, in order, without repetitions; the last one is that of the end."""
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_heard)  # it stays, and hears nothing while no folder is watched
    states = [state_of(folder)]
    _watched.append((folder.resolve(), states))
    try:
        yield states
    finally:
        _watched.pop()
    _add(states, state_of(folder))


def state_of(folder: Path) -> State:
    """What a folder holds now."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def put_back(state: State, folder: Path) -> None:
    """Make an empty folder hold a state."""
    for name, content in sorted(state.items()):
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _add(states: list[State], state: State) -> None:
    if state != states[-1]:
        states.append(state)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched or event not in _CHANGES or getattr(_looking, "is_looking", False):
        return
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
        return
    folder, states = _watched[-1]
    paths = [
        Path(os.path.abspath(os.fspath(argument)))
        for argument in arguments[:2]
        if isinstance(argument, str | os.PathLike)
    ]
    inside = [path for path in paths if path.is_relative_to(folder)]
    if not inside:
        return
    _looking.is_looking = True
    try:
        before = state_of(folder)
        _add(states, before)
        name = str(inside[0].relative_to(folder))
        if event == "open" and (arguments[2] & os.O_TRUNC or name not in before):
            _add(states, {**before, name: b""})
    finally:
        _looking.is_looking = False
