"""Reads the JSON that skyrl writes line by line, of which a disk or another program may have damaged a part.

Every reader of `metrics.jsonl`, `trajectories.jsonl`, `alarms.jsonl`, `timeline.jsonl` and the like uses this module: a
damaged line is left out and reported, and the others are read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

_LOG = logging.getLogger(__name__)
_LARGEST_STEP = 2**53
_NAMED = 5
"""Number of damaged lines that a report names; the others are counted."""


def complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines from the file's position on; one that is still being written, or was cut short by a kill, is left out."""
    for line in file:
        if not line.endswith(b"\n"):
            return
        yield line


def record_of(line: bytes, *, of_steps: bool = True) -> dict[str, Any] | None:
    """The JSON object in a line; None if the line is damaged. `of_steps`: every record has the number of its `step`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    return record if not of_steps or (type(step) is int and 0 <= step < _LARGEST_STEP) else None


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
    report_damaged(path, damaged)


def report_damaged(path: Path, lines: Sequence[int]) -> None:
    """Warn of damaged lines that were left out, if there are any; lines are counted from 1."""
    if lines:
        named = ", ".join(map(str, lines[:_NAMED])) + (" ..." if len(lines) > _NAMED else "")
        _LOG.warning("%s: %d damaged line(s) left out (line %s)", path, len(lines), named)
