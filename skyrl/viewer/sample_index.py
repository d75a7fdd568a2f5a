"""An index of `trajectories.jsonl`, stored next to it and updated while the run writes.

`RUN/trajectories.index` is an SQLite database: the position of each line in the file, the columns for filtering and
sorting, and an FTS5 index of the words. Texts stay in the JSON lines. The file may be deleted at any time.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from hashlib import blake2b
from itertools import islice
from math import isfinite, nan
from pathlib import Path
from typing import Any, BinaryIO

from skyrl.errors import DataError
from skyrl.storage.json_files import complete_lines, record_of
from skyrl.tracking.jsonlines import sample_of
from skyrl.viewer.conversation import excerpt, expected_answer, last_prompt
from skyrl.viewer.sample_filter import ORDERS, SampleFilter

VERSION = 2
"""Version of the tables. An index of another version is rebuilt."""

_TABLES = """
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, offset INTEGER, size INTEGER, step INTEGER, grp INTEGER, prompt_id TEXT, sample INTEGER,
    source TEXT, reward REAL, length INTEGER, stop_reason TEXT, failed INTEGER, excerpt TEXT,
    prompt TEXT, expected TEXT
);
CREATE INDEX by_step ON samples (step, prompt_id, grp, reward);
CREATE INDEX by_prompt ON samples (prompt_id, step);
CREATE INDEX by_reward ON samples (reward);
CREATE INDEX by_length ON samples (length);
CREATE INDEX by_source ON samples (source);
CREATE VIRTUAL TABLE words USING fts5 (text, content='');
CREATE TABLE state (inode INTEGER, position INTEGER, last_offset INTEGER, last_digest BLOB);
INSERT INTO state VALUES (0, 0, 0, x'');
"""
_EXCERPT = 160
"""Number of characters of a prompt, an answer and an expected answer that a list shows."""


class SampleIndex:
    """The index of one file of samples. Call `update` from one thread at a time; other methods may run concurrently."""

    def __init__(self, samples: Path, index: Path) -> None:
        """`index` is created if it does not exist. Raises `DataError` if that fails."""
        self.samples, self._path = samples, index
        try:
            self._prepare()
        except (sqlite3.Error, OSError) as error:
            raise DataError(f"the index {index} cannot be created: {error}; see --index") from error

    def update(self, most: int = 500) -> int:
        """Index up to `most` more lines. Returns the number of new lines; 0 if all complete lines are indexed."""
        with self._connected() as connection:
            inode, position, last_offset, last_digest = connection.execute("SELECT * FROM state").fetchone()
            try:
                lines = self.samples.open("rb")
            except FileNotFoundError:  # the run has not begun
                return 0
            with lines:
                if _was_replaced(lines, inode, position, last_offset, last_digest):
                    connection.execute("DELETE FROM samples")
                    connection.execute("INSERT INTO words (words) VALUES ('delete-all')")
                    position = 0
                result = list(_complete_lines(lines, position, most))
                if result:
                    self._add(connection, result)
                    offset, line = result[-1]
                    state = (os.fstat(lines.fileno()).st_ino, offset + len(line), offset, _digest(line))
                    connection.execute("UPDATE state SET inode=?, position=?, last_offset=?, last_digest=?", state)
                connection.commit()
        return len(result)

    def count(self, sample_filter: SampleFilter) -> int:
        """Number of samples that match."""
        where, values = sample_filter.condition()
        with self._connected() as connection:
            (total,) = connection.execute(f"SELECT count(*) FROM samples WHERE {where}", values).fetchone()
        return int(total)

    def rows(self, sample_filter: SampleFilter, *, first: int = 0, most: int = 50) -> list[dict[str, Any]]:
        """Columns of at most `most` matching samples, in the filter's order, from index `first`."""
        where, values = sample_filter.condition()
        query = f"SELECT * FROM samples WHERE {where} ORDER BY {ORDERS[sample_filter.order]} LIMIT ? OFFSET ?"
        with self._connected() as connection:
            return [dict(row) for row in connection.execute(query, (*values, most, first))]

    def choices(self) -> dict[str, list[Any]]:
        """Values to choose from in filters: sources, and the first and last step."""
        with self._connected() as connection:
            sources = connection.execute("SELECT DISTINCT source FROM samples ORDER BY source LIMIT 200")
            steps = connection.execute("SELECT min(step), max(step) FROM samples").fetchone()
            return {"sources": [source for (source,) in sources], "steps": list(steps)}

    def reward_range(self) -> tuple[float, float]:
        """Least and largest reward, and at least from 0 to 1."""
        with self._connected() as connection:
            least, most = connection.execute("SELECT min(reward), max(reward) FROM samples").fetchone()
        return min(least or 0.0, 0.0), max(most or 0.0, 1.0)

    def neighbours(self, number: int) -> tuple[int | None, int | None]:
        """Numbers of the samples before and after one, in the order of the file."""
        query = "SELECT (SELECT max(id) FROM samples WHERE id < ?), (SELECT min(id) FROM samples WHERE id > ?)"
        with self._connected() as connection:
            before, after = connection.execute(query, (number, number)).fetchone()
        return before, after

    def group_of(self, number: int) -> list[dict[str, Any]]:
        """Columns of all samples of the same prompt and step as this one, itself included."""
        query = """SELECT other.* FROM samples AS one JOIN samples AS other
            ON other.step = one.step AND other.prompt_id = one.prompt_id AND other.grp = one.grp
            WHERE one.id = ? ORDER BY other.id LIMIT 256"""
        with self._connected() as connection:
            return [dict(row) for row in connection.execute(query, (number,))]

    def record(self, number: int) -> dict[str, Any] | None:
        """The line of a sample; None if there is no such sample, or the run has truncated its file meanwhile."""
        with self._connected() as connection:
            row = connection.execute("SELECT * FROM samples WHERE id = ?", (number,)).fetchone()
        if row is None:
            return None
        with self.samples.open("rb") as lines:
            lines.seek(row["offset"])
            line = lines.read(row["size"])
        record = _parsed(line)
        if record is None:
            return None
        own = _columns(record)
        return record if all(own[name] == row[name] for name in ("step", "prompt_id")) else None

    def _prepare(self) -> None:
        """Rebuild the index if it has another version or is damaged."""
        try:
            with self._connected() as connection:
                if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
                    return
        except sqlite3.DatabaseError:
            pass  # it is not a database
        for name in ("", "-journal"):
            self._path.with_name(self._path.name + name).unlink(missing_ok=True)
        if self.samples.exists():  # who may not read the samples may not read their index
            self._path.touch(mode=self.samples.stat().st_mode & 0o777)
        with self._connected() as connection:
            connection.executescript(_TABLES + f"PRAGMA user_version = {VERSION};")

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=30)) as connection:
            connection.row_factory = sqlite3.Row
            for pragma in ("trusted_schema = OFF", "synchronous = OFF", "cache_size = -16000"):
                connection.execute(f"PRAGMA {pragma}")
            yield connection

    def _add(self, connection: sqlite3.Connection, lines: list[tuple[int, bytes]]) -> None:
        """Add the columns and words of each line; lines that are not a sample's record are skipped."""
        for offset, line in lines:
            record = _parsed(line)
            if record is not None:
                columns = {"offset": offset, "size": len(line), **_columns(record)}
                names, marks = ", ".join(columns), ", ".join("?" * len(columns))
                added = connection.execute(f"INSERT INTO samples ({names}) VALUES ({marks})", tuple(columns.values()))
                connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (added.lastrowid, _text(record)))


def _was_replaced(lines: Any, inode: int, position: int, last_offset: int, last_digest: bytes) -> bool:
    """Whether the file changed before `position`: a run that resumes truncates it and writes other lines."""
    status = os.fstat(lines.fileno())
    if position == 0:
        return False
    lines.seek(last_offset)
    return status.st_ino != inode or _digest(lines.read(position - last_offset)) != last_digest


def _complete_lines(lines: BinaryIO, position: int, most: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of the next lines; one that is still being written is left for later."""
    lines.seek(position)
    for line in islice(complete_lines(lines), most):
        yield position, line
        position += len(line)


def _digest(line: bytes) -> bytes:
    return blake2b(line, digest_size=16).digest()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a sample; None for a line that is damaged or not one."""
    record = record_of(line)
    return sample_of(record) if record is not None else None


def _columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a line; earlier releases wrote no `group` and no `source`."""
    rows = [*record.get("earlier", ()), record]
    return {
        "step": record["step"],
        "grp": record.get("group", -1),
        "prompt_id": _storable(str(record.get("prompt_id"))),
        "sample": record.get("sample", 0),
        "source": _storable(str(record.get("source", "default"))),
        "reward": _finite(record.get("reward")),
        "length": sum(len(row.get("response_ids", ())) for row in rows),
        "stop_reason": _storable(str(record.get("stop_reason", ""))),
        "failed": int(bool(record.get("failures") or record.get("skipped"))),
        "excerpt": _storable(" ▸ ".join(excerpt(str(row.get("response", "")), _EXCERPT) for row in rows)[:_EXCERPT]),
        "prompt": _storable(_one_line_excerpt(last_prompt(record))),
        "expected": _storable(_one_line_excerpt(expected_answer(record))),
    }


def _one_line_excerpt(text: str) -> str:
    return " ".join(text[: 2 * _EXCERPT].split())[:_EXCERPT]


def _storable(text: str) -> str:
    """The text without lone surrogates, which the database does not take."""
    return text.encode("utf-8", "replace").decode()


def _finite(value: object) -> float | None:
    """A reward; None for one that is not a finite number."""
    try:
        number = float(value) if isinstance(value, int | float) else nan
    except OverflowError:
        return None
    return number if isfinite(number) else None


def _text(record: Mapping[str, Any]) -> str:
    """All text of a sample that a user may search for."""
    messages = [str(message.get("content", "")) for message in record.get("prompt", ())]
    answers = [str(row.get("response", "")) for row in (*record.get("earlier", ()), record)]
    problems = *map(str, record.get("failures", ())), str(record.get("skipped", ""))
    return _storable("\n".join((*messages, *answers, *problems)))
