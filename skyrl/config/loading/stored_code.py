"""Finds code that only a stored configuration names, and that no file or argument of the user names as well.

A checkpoint may come from somewhere else, and following an import path means running what it names. Code that runs of
this user were started with need not be named again. A run that starts adds a line to a file in the user's state folder,
where no run folder can forge it, for each field with an import path: the digest of the run's folder, the working
directory, the field, its value, and the digests of its source files. What a stored configuration names is one's own if
all of these are as they were then: the same code in the same folder. Programs, arguments of engines and addresses of
clusters are never recorded: what they run depends on more than their text.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import Any

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.code_digests import IMPORTED, code_digests, imported_by, source_file, value_at
from skyrl.errors import Problem
from skyrl.tree.files import STORED_FILES
from skyrl.tree.origins import Origins, place_of

_COMMAND = "environment.agent.command"
_SERVERS = "environment.skyrl_gym.mcp.servers"
_ENGINE = "generator.inference_engine.engine_init_kwargs"
_CLUSTERS = ("trainer.placement.ray_address", "placement.ray_address")


def code_that_is_only_stored(run: RunConfig, origins: Origins) -> Iterator[Problem]:
    """Import paths and other code that would run when the run starts, and that only a stored configuration names."""
    for path, value, danger in named_code(run):
        if any(chain[-1].is_stored for known, chain in origins.items() if f"{known}.".startswith(f"{path}.")):
            words = value if isinstance(value, str) else json.dumps(value)
            yield Problem(
                path=path,
                message=f"{words} is code that only the stored run names, and that runs only if you name it, too: "
                f"{danger}",
                hint=f"if you trust it, pass --trust, or name it in this command, too: {path}={shlex.quote(words)}",
                location=place_of(path, origins),
            )


def named_code(run: RunConfig) -> Iterator[tuple[str, Any, str]]:
    """Path, value and danger of each place of the tree that names code."""
    for path in IMPORTED:
        value = value_at(run, path)
        if imported_by(value):
            yield path, value, "reading it runs it"
    if command := value_at(run, _COMMAND):
        yield _COMMAND, list(command), "it is a program that would be started"
    for server in value_at(run, _SERVERS) or ():
        if server.command:
            yield _SERVERS, list(server.command), "it is a program that would be started"
    for name, value in (value_at(run, _ENGINE) or {}).items():
        yield f"{_ENGINE}.{name}", value, "the engine may run code for it"
    for path in _CLUSTERS:
        if value := value_at(run, path):
            yield path, value, "a Ray cluster hands over pickles, which run code"


_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def trusting_stored_code() -> Iterator[None]:
    """Context in which a stored configuration may name any code."""
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


def record_code(run: RunConfig, folders: Iterable[str]) -> None:
    """Remember the code of a run that starts, for configurations stored in these folders. A state folder that cannot be
    written is left alone: the code then has to be named again.
    """
    code_lines = {
        line for folder in folders if "://" not in folder for field in IMPORTED if (line := _line(run, field, folder))
    }
    with suppress(OSError, RuntimeError):
        file = _file()
        if new := code_lines - _lines():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with file.open("a", encoding="ascii") as lines:
                lines.write("".join(f"{line}\n" for line in sorted(new)))


def may_run(run: RunConfig, path: str, origins: Origins) -> bool:
    """Whether code that only a stored configuration names, in the field `path`, may run: trusted, or one's own."""
    if _trusted.get():
        return True
    stored = {
        chain[-1].where
        for known, chain in origins.items()
        if chain[-1].is_stored and f"{known}.".startswith(f"{path}.")
    }
    with suppress(OSError, RuntimeError):
        known = _lines()
        return bool(stored) and all(_line(run, path, str(_folder_of(file))) in known for file in stored)
    return False


def _line(run: RunConfig, field: str, folder: str) -> str | None:
    """The line for the code in one field; None if it has none, or if the source of any of it was not found."""
    names = imported_by(value_at(run, field)) if field in IMPORTED else []
    if not names or not all(source_file(name.rpartition(":")[0]) for name in names):
        return None
    digests = {file: digest for file, digest in code_digests(run).items() if file.startswith(f"{field}: ")}
    if not all(digests.values()):
        return None
    path = str(Path(folder).expanduser().resolve())
    facts = [path, os.getcwd(), field, value_at(run, field), digests]
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _folder_of(file: str) -> Path:
    """The folder of a run, or of its checkpoints, in which a stored configuration is."""
    path = Path(file).expanduser().resolve()
    return path.parent if path.name == STORED_FILES[0] else path.parent.parent


def _lines() -> set[str]:
    file = _file()
    return set(file.read_text(encoding="ascii", errors="replace").split()) if file.is_file() else set()


def _file() -> Path:
    state_home = os.environ.get("XDG_STATE_HOME", "")
    state = Path(state_home) if os.path.isabs(state_home) else Path.home() / ".local" / "state"
    return state / "skyrl" / "code_of_runs"
