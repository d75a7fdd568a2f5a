"""Machine code inside of CUDA libraries, emptied for all GPUs but one, so that the files compress well.

A library holds fatbins: a header and entries, each for one architecture (a cubin) or as PTX. Only payloads are
overwritten with zeros. Headers and offsets stay, so that the driver still finds the entry of its own architecture.
Measured with torch 2.13, vLLM 0.32 and NCCL 2.29: 2.0 GB of wheels become 0.4 GB.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

_MAGIC = struct.pack("<I", 0xBA55ED50)
_PTX, _CUBIN = 1, 2


@frozen
class Entry:
    """One entry of a fatbin."""

    kind: int
    architecture: int
    """Compute capability times ten, such as 90."""

    start: int
    size: int
    """The payload, in bytes of the file."""


def keep_only(library: Path, architecture: int) -> int:
    """Empties, in place, what a GPU of this architecture does not read; returns the number of emptied bytes.

    PTX stays where a fatbin has no cubin of the architecture, since the driver then compiles it.
    """
    emptied = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entries in _fatbins(data):
            compiled = any(entry.kind == _CUBIN and entry.architecture == architecture for entry in entries)
            for entry in entries:
                own = entry.kind == _CUBIN and entry.architecture == architecture
                source = entry.kind == _PTX and not compiled and entry.architecture <= architecture
                if not own and not source:
                    data[entry.start : entry.start + entry.size] = bytes(entry.size)
                    emptied += entry.size
    return emptied


def _fatbins(data: mmap.mmap) -> Iterator[list[Entry]]:
    at = data.find(_MAGIC)
    while at >= 0:
        entries = list(_entries(data, at))
        yield entries
        at = data.find(_MAGIC, entries[-1].start + entries[-1].size if entries else at + len(_MAGIC))


def _entries(data: mmap.mmap, start: int) -> Iterator[Entry]:
    """Entries of the fatbin at `start`; none if the bytes only look like one."""
    if start + 16 > len(data):
        return
    version, header, size = struct.unpack_from("<HHQ", data, start + 4)
    at, end = start + header, start + header + size
    if (version, header) != (1, 16) or end > len(data):
        return
    while at + 64 <= end:
        kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, at)
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        if kind not in (_CUBIN, _PTX) or not 64 <= entry_header <= 4096 or at + entry_header + payload > end:
            return
        yield Entry(kind, architecture, at + entry_header, payload)
        at += entry_header + payload
