"""Sharded tensors: every rank stores the shards it holds, and any number of ranks can load the parts they need.

A shard is a contiguous range of a flattened tensor. FSDP2 gives a rank whole rows, ZeRO an arbitrary range of numbers;
both are such ranges. A rank's file is an ordinary safetensors file, whose metadata gives the start of each shard and
the shape of its whole tensor; a shard that is the whole tensor is stored with that shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeGuard

import torch
from attrs import frozen
from torch import Tensor

from skyrl.checkpoint.manifest import StoredFile, is_count
from skyrl.errors import ResumeError
from skyrl.storage.disk import Bytes, Storage, digest_of

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors files."""

_TYPES = {name: dtype for dtype, name in NAMES.items()}
_INDEX = "pieces"

_BEGINNING = 1 << 20
"""Number of bytes that are read of a file at first: its header, as a rule."""

LARGEST_HEADER = 100_000_000
"""Largest header of a safetensors file, in bytes; the library itself reads no larger one."""

FILE_BYTES = 1 << 30
"""Number of bytes that `WeightFiles` gathers in memory before a file is written; a larger tensor is still gathered
whole."""


@frozen(kw_only=True, eq=False)
class TensorShard:
    """Numbers `start` to `start + numbers.numel()` of the tensor `name`, whose whole shape is `shape`.

    Example: the lower half of a (4, 3) matrix is `TensorShard(name="w", shape=(4, 3), start=6, numbers=<6 numbers>)`
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    numbers: Tensor

    @classmethod
    def from_full_tensor(cls, name: str, tensor: Tensor) -> TensorShard:
        """A whole tensor, of any shape, as a single shard."""
        return cls(name=name, shape=tuple(tensor.shape), numbers=tensor)

    def copy_to_host(self) -> TensorShard:
        """A copy in host memory, which later changes of the tensor do not affect."""
        numbers = self.numbers.detach().to("cpu", copy=True).contiguous().view(-1)
        return TensorShard(name=self.name, shape=self.shape, start=self.start, numbers=numbers)


class TensorSource(Protocol):
    """Whole tensors by name, from which any range can be read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors, by name."""

    def read(self, name: str, start: int = 0, count: int | None = None) -> Tensor:
        """(count,): numbers `start` to `start + count` of the flattened tensor, or all from there, on the host."""


def write_shards(shards: Sequence[TensorShard], storage: Storage, folder: str, name: str) -> StoredFile:
    """Store shards from host memory as the file `name` of a checkpoint's folder. Returns its size and digest."""
    index = {shard.name: [list(shard.shape), shard.start] for shard in shards}
    header: dict[str, Any] = {"__metadata__": {_INDEX: json.dumps(index, separators=(",", ":"))}}
    start = 0
    for shard in shards:
        numbers, size = shard.numbers, shard.numbers.nbytes
        is_whole = numbers.numel() == math.prod(shard.shape)
        header[shard.name] = {
            "dtype": NAMES[numbers.dtype],
            "shape": list(shard.shape) if is_whole else [numbers.numel()],
            "data_offsets": [start, start + size],
        }
        start += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    content: list[Bytes] = [len(text).to_bytes(8, "little") + text]
    content += [shard.numbers.contiguous().view(-1).view(torch.uint8).numpy().data for shard in shards]
    storage.write(f"{folder}/{name}", content)
    return StoredFile(name=name, size=sum(map(len, content)), digest=digest_of(content))


@frozen(kw_only=True)
class _Place:
    """Location of a shard."""

    file: str
    offset: int
    """Offset in the file, in bytes."""

    dtype: torch.dtype
    start: int
    count: int


@frozen(slots=False)
class StoredTensors(Mapping[str, Tensor]):
    """The tensors of some files of a checkpoint, read on demand; pickling copies no data.

    As a mapping it gives whole tensors, assembled from their shards.
    """

    storage: Storage
    folder: str
    """Folder of the checkpoint."""

    files: tuple[str, ...]
    """Names of the files inside the folder."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._index[0]

    def read(self, name: str, start: int = 0, count: int | None = None) -> Tensor:
        """(count,): numbers `start` to `start + count` of the flattened tensor, or all from there, on the host.

        Raises `ResumeError` if a part of the tensor is in no file.
        """
        shapes, segments = self._index
        count = math.prod(shapes[name]) - start if count is None else count
        result = torch.empty(count, dtype=segments[name][0].dtype)
        filled = 0
        for segment in segments[name]:
            first, last = max(start, segment.start), min(start + count, segment.start + segment.count)
            if first < last:
                result[first - start : last - start] = self._numbers(segment, first - segment.start, last - first)
                filled += last - first
        if filled != count:
            raise ResumeError(
                f"{self._location()}: {name} lacks {count - filled} of {count} numbers, which are in none of its files"
            )
        return result

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name).view(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getstate__(self) -> dict[str, Any]:
        return {"storage": self.storage, "folder": self.folder, "files": self.files}

    def _numbers(self, segment: _Place, start: int, count: int) -> Tensor:
        size = segment.dtype.itemsize
        content = self.storage.read(f"{self.folder}/{segment.file}", segment.offset + start * size, count * size)
        return torch.frombuffer(content, dtype=segment.dtype)

    @cached_property
    def _index(self) -> tuple[dict[str, tuple[int, ...]], dict[str, list[_Place]]]:
        shapes: dict[str, tuple[int, ...]] = {}
        segments: dict[str, list[_Place]] = {}
        for file in self.files:
            for name, shape, segment in self._places_in(file):
                tensor_segments = segments.setdefault(name, [])
                if shapes.setdefault(name, shape) != shape or any(
                    row.dtype != segment.dtype for row in tensor_segments
                ):
                    raise ResumeError(
                        f"{self._location(file)} is damaged: {name} has another shape or type in another file"
                    )
                tensor_segments.append(segment)
        for name, shape in shapes.items():
            total = math.prod(shape)
            missing = total - sum(segment.count for segment in segments[name])
            if missing > 0:  # raised before memory is allocated for the tensor
                raise ResumeError(
                    f"{self._location()}: {name} lacks {missing} of {total} numbers, which are in none of its files"
                )
        return shapes, segments

    def _location(self, file: str = "") -> str:
        return f"{self.storage.where}/{self.folder}/{file}".rstrip("/")

    def _places_in(self, file: str) -> Iterator[tuple[str, tuple[int, ...], _Place]]:
        path = f"{self.folder}/{file}"
        try:
            size = self.storage.size(path)
            beginning = self.storage.read(path, 0, min(size, _BEGINNING))
            length = int.from_bytes(beginning[:8], "little")
            room = size - 8 - length  # for the numbers
            if room < 0 or length > LARGEST_HEADER:
                raise ValueError(f"its header claims {length} bytes")
            is_in = 8 + length <= len(beginning)
            header = json.loads(beginning[8 : 8 + length] if is_in else self.storage.read(path, 8, length))
            index = json.loads(header["__metadata__"][_INDEX])
            for name, (shape, start) in index.items():  # a forged header is refused before memory is allocated by it
                entry = header[name]
                part, offsets, dtype = entry["shape"], entry["data_offsets"], _TYPES[entry["dtype"]]
                if not (are_counts(part) and are_counts(offsets) and len(offsets) == 2 and is_count(start)):
                    raise ValueError(
                        f"its shape {part}, offsets {offsets} or start {start} are not non-negative integers"
                    )
                (first, last), count = offsets, math.prod(part)
                if last > room or last - first != count * dtype.itemsize:
                    raise ValueError(f"{last - first} bytes at {first} do not hold the shape {part}")
                if not are_counts(shape) or start + count > math.prod(shape):
                    raise ValueError(f"{name} is not part of a tensor of shape {shape}")
                place = _Place(file=file, offset=8 + length + first, dtype=dtype, start=start, count=count)
                yield name, tuple(shape), place
        except (KeyError, TypeError, ValueError, AttributeError, OSError, RecursionError) as error:
            raise ResumeError(f"{self._location(file)} cannot be read: {error}") from error


def are_counts(values: object) -> TypeGuard[list[int]]:
    """Whether the value is a list of non-negative integers."""
    return isinstance(values, list) and all(map(is_count, values))


@frozen(kw_only=True)
class WeightFiles:
    """Stores whole weights in a folder, to be read as `StoredTensors`: so one model gets the weights of another,
    however each is sharded over its ranks. It runs in the process that gathers them, so it can be pickled.
    """

    storage: Storage
    folder: str

    def __call__(self, weights: Iterator[tuple[str, Tensor]]) -> tuple[str, ...]:
        """Write the weights, pairs of a name and a whole tensor of any shape. Returns the names of the files.

        Raises `OSError` if they cannot be written.
        """
        files: list[str] = []
        shards: list[TensorShard] = []
        for name, weight in weights:
            shards.append(TensorShard.from_full_tensor(f"model.{name}", weight).copy_to_host())
            if sum(shard.numbers.nbytes for shard in shards) >= FILE_BYTES:
                files.append(self._write(shards, len(files)))
                shards = []
        return (*files, *([self._write(shards, len(files))] if shards else ()))

    def _write(self, shards: list[TensorShard], number: int) -> str:
        return write_shards(shards, self.storage, self.folder, f"{number}.safetensors").name
