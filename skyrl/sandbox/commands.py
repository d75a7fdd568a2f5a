"""Commands of a configuration, as they are started in a sandbox: with absolute paths, and the files that they read."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from skyrl.errors import TaskError


@frozen
class LocatedCommand:
    """A command whose words that name existing files are absolute paths."""

    arguments: tuple[str, ...]
    files: tuple[Path, ...]
    """Files and folders that the command needs to read, its program among them."""


def located_command(command: Sequence[str], readable: Sequence[str], field: str) -> LocatedCommand:
    """Find the program and the files that a command and `readable` name; `field` is the path of its table in the
    configuration. Raises `TaskError` for what does not exist.
    """
    paths = [Path(path).expanduser().resolve() for path in readable]
    for path in paths:
        if not path.exists():
            raise TaskError(f"{field}.readable names {path}, which does not exist")
    words = [os.path.realpath(word) if os.path.exists(word) else word for word in command[1:]]
    program, file = _program(command[0], paths)
    if not program:
        raise TaskError(f"the program {command[0]} does not exist, or cannot be run ({field}.command)")
    named = [Path(word) for word in (file, *words) if os.path.exists(word)]
    return LocatedCommand((program, *words), tuple(dict.fromkeys([*named, *paths])))


def _program(name: str, readable: Sequence[Path]) -> tuple[str, str]:
    """Path by which the program is started, and the file behind it; empty for one that does not exist. A link to Python
    determines which packages it finds, so the link is started if programs in the sandbox can read it.
    """
    located = shutil.which(name)
    if located is None:
        return "", ""
    started, file = os.path.abspath(located), os.path.realpath(located)
    has_its_link = any(Path(started).is_relative_to(path) for path in (Path(sys.prefix), *readable))
    return (started if has_its_link else file), file
