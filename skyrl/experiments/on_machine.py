"""What may be missing on this machine, whatever kind of run names it: each function finds it of one setting."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from skyrl.errors import Problem
from skyrl.models.paths import check_model_path

_FILES = (".parquet", ".jsonl", ".csv", ".json")


def packages(wanted: Iterable[tuple[str, str, str]]) -> Iterator[Problem]:
    """Of (the path that asks for it, the package, the extra that brings it), those that are not installed."""
    for field, package, extra in wanted:
        if importlib.util.find_spec(package) is None:
            message = f"needs the package {package}, which is not installed"
            yield Problem(path=field, message=message, hint=f"pip install 'skyrl[{extra}]'")


def model(field: str, path: str | None) -> Iterator[Problem]:
    """A local folder holds a model; a hub name can only be tried."""
    why = no_path(path) or check_model_path(path) if path else None
    if why:
        yield Problem(path=field, message=why)


def data(field: str, sources: Iterable[str]) -> Iterator[Problem]:
    """A source that names a file is there; a hub name can only be tried."""
    for source in sources:
        why = no_path(source)
        if not why and Path(source).suffix in _FILES and not Path(source).expanduser().is_file():
            why = f"there is no file {source}"
        if why:
            yield Problem(path=field, message=why)


def folder_name(field: str, path: str | None) -> Iterator[Problem]:
    """A folder to write to has a name, and one that this machine takes."""
    why = "is empty: name a folder" if path == "" else path and no_path(path)
    if why:
        yield Problem(path=field, message=why)


def checkpoint(field: str, path: str, hint: str = "") -> Iterator[Problem]:
    """A checkpoint on a disk is there."""
    if "://" in path:
        return
    why = no_path(path) or (None if Path(path).expanduser().is_dir() else f"there is no folder {path}")
    if why:
        yield Problem(path=field, message=why, hint=hint)


def no_path(path: str) -> str | None:
    """Why the file system will not even look at the path, such as the home of a user who does not exist."""
    try:
        Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{path[:80]!r} is not a path here: {error}"
    return None
