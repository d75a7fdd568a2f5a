"""Finds the storage at an address: a path, or the URL of an object store such as `s3://bucket/folder`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl.storage.disk import Disk, Storage


def is_address(where: str | Path) -> bool:
    """Whether this is an address of an object store."""
    return "://" in str(where)


def storage_at(where: str | Path) -> Storage:
    """Storage of a folder, which need not exist yet. Using a storage with an unknown protocol raises `UserError`."""
    if not is_address(where):
        return Disk(Path(where).expanduser().absolute())
    from skyrl.storage.bucket import Bucket

    return Bucket(str(where).rstrip("/"))


@contextmanager
def here(where: str | Path, name: str) -> Iterator[Path]:
    """Local path of a file in a folder. A file in an object store is copied, and the copy is deleted afterwards."""
    if not is_address(where):
        yield Path(where) / name
        return
    with tempfile.NamedTemporaryFile() as copy:
        for chunk in storage_at(where).chunks(name):
            copy.write(chunk)
        copy.flush()
        yield Path(copy.name)
