"""Rows that are read while a run trains on them: sources of any size, without random access.

A pass reads the files of all sources, in random order if the run shuffles. Rows go through a buffer: so many rows are
read, and handed out in random order before others are read. All orders follow from (seed, pass, number of the buffer in
the pass). So the state of a stream is where its buffer begins and how many rows of it were handed out; a resumed run
reads the buffer again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from skyrl.config.foundation.reasoning_tasks import SCHEME
from skyrl.data.data_files import DataFile, data_files, has_files
from skyrl.data.hugging_face import streamed_dataset
from skyrl.data.sources import BadRow, ColumnKinds, Columns, Row, holds_tasks, iterate_rows, read_file
from skyrl.errors import DataError

if TYPE_CHECKING:
    from datasets import IterableDataset

State = Mapping[str, Any]

EXAMINED = 1000
"""Number of streamed rows that are examined before a run starts."""

_COMPARED = 256
"""Number of files of a source whose columns are compared before any is read."""

_ENDS = 64 << 10
"""Number of bytes at each end of a file that tell it from another one of its size."""


class OpenSource:
    """The rows of a part from a state on."""

    def __init__(self, read: Callable[[int], Iterator[Row | BadRow]], state: State) -> None:
        """`read` gives the rows from the one with a number, counted from 0."""
        self._read, self._row = read, int(state.get("row", 0))

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        """Each row with its number, counted from 0. Raises `DataError`."""
        for row in self._read(self._row):
            self._row += 1
            yield self._row - 1, row

    def state(self) -> dict[str, object]:
        """The state from which the rest is read."""
        return {"row": self._row}


class _DatasetStream(OpenSource):
    def __init__(self, source: str, state: State) -> None:
        self._dataset: IterableDataset = streamed_dataset(source)
        super().__init__(lambda _: iter(self._dataset), state)  # from its own state on
        if "dataset" in state:
            self._dataset.load_state_dict(state["dataset"])

    def state(self) -> dict[str, object]:
        return {**super().state(), "dataset": self._dataset.state_dict()}


@frozen
class Part:
    """A file, or another source that is read as a whole."""

    source: int
    """Number of its source."""

    name: str
    """What messages call it."""

    prefix: str
    """Beginning of the ids of its rows."""

    read: Callable[[State], OpenSource]


@frozen
class StreamedRow:
    """A row and where it was read."""

    part: Part
    index: int
    row: Row | BadRow


def parts_of(sources: Sequence[str], columns: Columns | None = None) -> tuple[Part, ...]:
    """The parts of all sources, in their order. Raises `DataError` for a missing file, and for files of one source of
    which a column has values of different kinds.
    """
    parts: list[Part] = []
    for number, source in enumerate(sources):
        if has_files(source):
            files = data_files(source)
            several = len(files) > 1
            kinds = ColumnKinds()
            for file in files[:: -(-len(files) // _COMPARED)] if several else ():
                kinds.add(file)
            for index, file in enumerate(files):
                prefix = f"{number}:{index}/" if several else f"{number}:"
                read: Callable[[State], OpenSource] = partial(OpenSource, partial(read_file, file, columns))
                parts.append(Part(number, file.location, prefix, read))
            continue
        if source.startswith(SCHEME) or holds_tasks(Path(source).expanduser()):
            read = partial(OpenSource, partial(_rows_from, source))
        else:
            read = partial(_DatasetStream, source)
        parts.append(Part(number, source, f"{number}:", read))
    return tuple(parts)


def _rows_from(source: str, start: int) -> Iterator[Row | BadRow]:
    return islice(iterate_rows(source), start, None)


def rows_in_order(source: str, columns: Columns | None = None, *, streamed: bool) -> Iterator[Row | BadRow]:
    """Every row of a source in turn. With `streamed`, a dataset of the hub is read without a download, as a run with
    `streaming` reads it. Raises `DataError`.
    """
    if not streamed:
        yield from iterate_rows(source, columns)
        return
    for part in parts_of((source,), columns):
        yield from (row for _, row in part.read({}).rows())


def versions(sources: Sequence[str]) -> str:
    """A digest of what is known about the content of the sources without reading it: of files on a disk, names, sizes
    and both ends; of objects, addresses, sizes and versions; of other sources, names.
    """
    digest = sha256()
    for source in sources:
        for file in data_files(source) if has_files(source) else ():
            size, ends = _ends(file)
            digest.update(f"{Path(file.location).name} {size} ".encode() + ends)
        if not has_files(source):
            digest.update(source.encode())
    return digest.hexdigest()


def _ends(file: DataFile) -> tuple[int, bytes]:
    """The size of a file in bytes, and a digest of both of its ends."""
    with file.open() as opened:
        size = opened.seek(0, io.SEEK_END)
        opened.seek(0)
        first = last = opened.read(_ENDS)
        if size > _ENDS:
            opened.seek(size - _ENDS)
            last = opened.read(_ENDS)
        return size, sha256(first + last).digest()


class RowStream:
    """The rows of all parts, pass after pass."""

    def __init__(self, parts: Sequence[Part], *, buffer: int, seed: int | None) -> None:
        """`buffer` is the number of rows that are shuffled together. Without a `seed`, rows keep their order."""
        self._parts, self._buffer, self._seed = parts, buffer, seed
        self.passes = 0
        """Number of passes that are complete."""

        self._window, self._taken = -1, 0
        self._rows: list[StreamedRow] = []
        self._order: Sequence[int] = ()
        self._began: dict[str, Any] = {"part": 0}
        self._after: dict[str, Any] = {"part": 0}
        self._open: tuple[int, OpenSource, Iterator[tuple[int, Row | BadRow]]] | None = None

    def draw(self) -> StreamedRow:
        """The next row. Raises `DataError` if a part cannot be read, or if there is no row at all."""
        while self._taken == len(self._rows):
            self._advance()
        self._taken += 1
        return self._rows[self._order[self._taken - 1]]

    def _advance(self) -> None:
        """Go on to the next buffer, which may be the first one of the next pass."""
        if self._after["part"] == len(self._parts):
            if self._window == -1:
                raise DataError(f"{', '.join(part.name for part in self._parts[:3])}: no source contains rows")
            self.passes, self._window, self._after = self.passes + 1, -1, {"part": 0}
        self._fill(self._after)
        self._window += bool(self._rows)
        self._shuffle()

    def _fill(self, begin: dict[str, Any]) -> None:
        """Read a buffer from this position on."""
        self._began, self._taken, self._rows = begin, 0, []
        order, position, state = self._random(5, len(self._parts)), int(begin["part"]), begin
        while position < len(order) and len(self._rows) < self._buffer:
            part = self._parts[order[position]]
            if self._open is None or self._open[0] != position:
                reading = part.read(state)
                self._open = (position, reading, reading.rows())
            _, reading, rows = self._open
            for number, row in rows:
                self._rows.append(StreamedRow(part, number, row))
                if len(self._rows) == self._buffer:
                    break
            else:
                position, state, self._open = position + 1, {}, None
        inside = {} if self._open is None else self._open[1].state()
        self._after = {"part": position, **inside}

    def _shuffle(self) -> None:
        self._order = self._random(6, len(self._rows), max(self._window, 0))

    def _random(self, purpose: int, count: int, *numbers: int) -> Sequence[int]:
        if self._seed is None:
            return range(count)
        order = np.random.default_rng([self._seed, self.passes, *numbers, purpose]).permutation(count)
        return [int(index) for index in order]

    def state(self) -> dict[str, object]:
        """The position, as a checkpoint stores it."""
        return {"passes": self.passes, "buffer": self._window, "began": dict(self._began), "taken": self._taken}

    def load_state(self, state: State) -> None:
        """Continue where `state` was taken. Raises `DataError` as `draw` does."""
        self.passes, self._window, self._open = int(state["passes"]), int(state["buffer"]), None
        self._after, self._rows, self._taken = dict(state["began"]), [], 0
        if self._window >= 0:  # otherwise nothing of the pass was read
            self._fill(self._after)
            self._shuffle()
            self._taken = int(state["taken"])
