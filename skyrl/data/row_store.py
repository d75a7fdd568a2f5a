"""Tokenized rows on disk, for data larger than memory, and to avoid tokenizing the same data again in the next run.

    FOLDER/<key>/rows.bin      rows one after the other, as `to_bytes` writes them
    FOLDER/<key>/index.bin     for each row: its end in rows.bin, its source, its place in the source (three int64)
    FOLDER/<key>/about.json    number of rows of each source, rows that were left out, fingerprint

The key is a hash of the sources (name, size and modification time of files, fingerprint of datasets), the tokenizer,
the chat template and the settings for reading rows. A folder is written under another name and renamed when complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config.foundation.reasoning_tasks import SCHEME
from skyrl.data.data_files import has_files, versions_of
from skyrl.data.hugging_face import dataset_fingerprint
from skyrl.errors import DataError

FORMAT = 1
"""Version of the format, a part of every key. It changes when the files, or the learned tokens of a row, change."""

_ENTRY = np.dtype("<i8")
_COLUMNS = 3

R = TypeVar("R")


class RowsOnAccess(Sequence[R], Generic[R]):
    """Rows by place; a subclass defines their number, and how one of them is read."""

    @abstractmethod
    def read_row(self, index: int) -> R:
        """The row at an index, counted from 0, which exists."""

    @overload
    def __getitem__(self, index: int) -> R: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[R, ...]: ...

    def __getitem__(self, index: int | slice) -> R | tuple[R, ...]:
        indices = range(len(self))[index]
        return self.read_row(indices) if isinstance(indices, int) else tuple(map(self.read_row, indices))


class StoredRows(RowsOnAccess[R]):
    """Rows of a folder, each read on access. The index, 24 bytes per row, is mapped into memory."""

    def __init__(self, folder: Path, read: Callable[[str, bytes], R]) -> None:
        """`read` makes a row of its id and its bytes. Raises `DataError` if the folder's files are inconsistent."""
        self._read = read
        file = folder / "index.bin"
        index = np.memmap(file, _ENTRY, "r") if file.stat().st_size else np.empty(0, _ENTRY)
        self._index = index.reshape(-1, _COLUMNS)
        self._file = os.open(folder / "rows.bin", os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        if len(self._index) and self._index[-1, 0] != os.fstat(self._file).st_size:
            raise DataError(f"{folder} is damaged: delete it, and rows are tokenized again")

    def __len__(self) -> int:
        return len(self._index)

    def read_row(self, index: int) -> R:
        start = int(self._index[index - 1, 0]) if index else 0
        stop, source, number = (int(item) for item in self._index[index])
        return self._read(f"{source}:{number}", os.pread(self._file, stop - start, start))

    def by_id(self, row_id: str) -> R:
        """The row with this id. Raises `KeyError` if there is none."""
        source, number = map(int, row_id.split(":"))
        first, end = (int(np.searchsorted(self._index[:, 1], source, side)) for side in ("left", "right"))
        position = first + int(np.searchsorted(self._index[first:end, 2], number))
        if position == end or self._index[position, 2] != number:
            raise KeyError(row_id)
        return self[position]


def store_rows(folder: Path, rows: Iterable[tuple[str, bytes]]) -> str:
    """Write rows, given by id and bytes, into an empty folder as they arrive. Returns the sha256 of all of them.

    Raises `DataError` if they cannot be written.
    """
    digest, end = sha256(), 0
    try:
        with (folder / "rows.bin").open("wb") as file, (folder / "index.bin").open("wb") as index:
            for row_id, data in rows:
                digest.update(with_length(data))
                end += len(data)
                file.write(data)
                index.write(np.array([end, *map(int, row_id.split(":"))], _ENTRY).tobytes())
    except OSError as error:
        raise DataError(f"tokenized rows cannot be written to {folder}: {error.strerror}") from error
    return digest.hexdigest()


def with_length(data: bytes) -> bytes:
    """A row's length and bytes, so that the boundaries of rows are part of a digest."""
    return len(data).to_bytes(8, "little") + data


class RowFolder:
    """The folder of one tokenized data set below the configured folder."""

    def __init__(self, below: str, key: str) -> None:
        self._below = Path(below).expanduser()
        self.path = self._below / key

    def about(self) -> dict[str, Any] | None:
        """Description of rows that are already stored; None if there are none."""
        try:
            result: dict[str, Any] = json.loads((self.path / "about.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} cannot be read ({error}): delete it, and rows are tokenized again") from error
        return result

    def fill(self, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Call `fill(folder)` on an empty folder, store its result next to the rows, and move the folder into place."""
        try:
            self._below.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=self._below))
        except OSError as error:
            raise DataError(f"tokenized_path = {self._below} cannot be written: {error.strerror}") from error
        try:
            about: dict[str, Any] = fill(scratch)
            (scratch / "about.json").write_text(json.dumps(about), encoding="utf-8")
            if not self.path.exists():  # otherwise another run has just written the same rows
                scratch.rename(self.path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return about


def row_key(sources: Sequence[str], tokenizer: ChatTokenizer, settings: Mapping[str, Any]) -> str:
    """Key of the rows that result from these sources, this tokenizer and these settings."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = inner.to_str() if inner is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    described = {
        "format": FORMAT,
        "sources": [[source, list(_identity(source))] for source in sources],
        "tokenizer": sha256(f"{vocabulary} {tokenizer.eos_token_id}".encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "settings": settings,
    }
    return sha256(json.dumps(described, sort_keys=True, default=dict).encode()).hexdigest()[:32]


def _identity(source: str) -> Iterator[Any]:
    """Name, size in bytes and version of each file of a source; the fingerprint if it is a dataset on the hub."""
    if source.startswith(SCHEME):
        yield source, version("reasoning-gym")
        return
    if has_files(source):
        yield from versions_of(source)
        return
    named = Path(source).expanduser()
    path = named if named.exists() else Path(source.partition(":")[0]).expanduser()
    if not path.exists():
        yield dataset_fingerprint(source)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            status = file.stat()
            yield [str(file.absolute()), status.st_size, status.st_mtime_ns]
