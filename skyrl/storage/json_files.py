"""Reads the JSON that skyrl writes line by line, of which a disk or another program may have damaged a part.

Every reader of `metrics.jsonl`, `trajectories.jsonl`, `alarms.jsonl`, `timeline.jsonl` and the like uses this module: a
damaged line is left out and reported, and the others are read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_LOG = logging.getLogger(__name__)
LARGEST_STEP = 2**53
"""Upper bound of the number of a step; a record with a larger one is damaged."""

_NAMED = 5
"""Number of damaged lines that a report names; the others are counted."""


def complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines from the file's position on; one that is still being written, or was cut short by a kill, is left out."""
    for line in file:
        if not line.endswith(b"\n"):
            return
        yield line


def parsed(text: str) -> object:
    """The value of a JSON text; a lone surrogate, which no file, page or service takes, becomes a question mark.

    Raises `ValueError` and `RecursionError`.
    """
    value: object = json.loads(text)
    if "\\u" in text:  # the only way to write one in UTF-8
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def record_of(line: bytes, *, of_steps: bool = True) -> dict[str, Any] | None:
    """The JSON object in a line; None if the line is damaged. `of_steps`: every record has the number of its `step`."""
    try:
        record = parsed(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    return record if not of_steps or (type(step) is int and 0 <= step < LARGEST_STEP) else None


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Records of all complete lines of a file, each with its `step`; see `lines_with_records`."""
    return (record for _, record in lines_with_records(path))


def lines_with_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every complete line of a file, which need not exist, and its record, which has a `step`. Damaged lines are
    reported at the end.
    """
    if not path.is_file():
        return
    damaged = []
    with path.open("rb") as file:
        for number, line in enumerate(complete_lines(file), start=1):
            record = record_of(line)
            if record is None:
                damaged.append(number)
            else:
                yield line, record
    if damaged:
        named = ", ".join(map(str, damaged[:_NAMED])) + (" ..." if len(damaged) > _NAMED else "")
        _LOG.warning("%s: %d damaged line(s) left out (line %s)", path, len(damaged), named)


class GrowingLines:
    """A file of JSON lines that another process appends to. Each complete line that is not damaged is returned once.
    After the file is replaced, as when a run returns to a checkpoint, all lines are returned again.
    """

    def __init__(self, path: Path, *, of_steps: bool = True) -> None:
        """`of_steps`: each record has the number of its `step`."""
        self._path, self._of_steps = path, of_steps
        self._offset, self._inode = 0, 0

    @property
    def is_replaced(self) -> bool:
        """Whether the file was replaced since it was last read."""
        return bool(self._offset) and self._path.is_file() and self._path.stat().st_ino != self._inode

    def new(self) -> Iterator[dict[str, Any]]:
        """Records of the lines that were completed since the last call."""
        for line in self.new_lines():
            record = record_of(line, of_steps=self._of_steps)
            if record is not None:
                yield record

    def new_lines(self) -> Iterator[bytes]:
        """Lines that were completed since the last call, damaged ones included. A file that does not exist has no lines
        yet.
        """
        if not self._path.is_file():
            return
        with self._path.open("rb") as lines:
            inode = os.fstat(lines.fileno()).st_ino
            self._offset, self._inode = self._offset if inode == self._inode else 0, inode
            lines.seek(self._offset)
            for line in complete_lines(lines):
                self._offset += len(line)
                yield line
