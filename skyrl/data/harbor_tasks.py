"""Folders of Harbor tasks as rows: each task is a folder with an `instruction.md` and a `task.toml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os.path import isdir  # false for a name that no folder can have, where Path.is_dir raises
from pathlib import Path
from typing import Any

from skyrl.errors import DataError
from skyrl.tree.files import stored_text

_INSTRUCTION, _CONFIGURATION = "instruction.md", "task.toml"


def holds_tasks(folder: Path) -> bool:
    """Whether a folder contains task folders."""
    return isdir(folder) and next(_tasks(folder), None) is not None


def read_tasks(folder: Path) -> Iterator[Mapping[str, Any]]:
    """A row for each task, in the order of their names: the instruction as the user message, and the task's folder.

    Raises `DataError` for an instruction that cannot be read.
    """
    for task in sorted(_tasks(folder)):
        try:
            text = stored_text(task / _INSTRUCTION)
        except (OSError, ValueError) as error:
            raise DataError(f"{task / _INSTRUCTION} cannot be read: {error}") from error
        yield {
            "prompt": [{"role": "user", "content": text}],
            "harbor_task": str(task.absolute()),
            "data_source": folder.name,
        }


def _tasks(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if (path / _INSTRUCTION).is_file() and (path / _CONFIGURATION).is_file())
