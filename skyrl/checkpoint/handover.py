"""Weights of one model handed to another through files, however either is spread over its ranks."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen
from torch import Tensor

from skyrl.checkpoint.shards import TensorShard, write_shards
from skyrl.storage.disk import Storage

FILE_BYTES = 1 << 30
"""Bytes gathered in memory at a time, or one tensor that is larger."""


@frozen(kw_only=True)
class WeightFiles:
    """Stores whole weights in a folder, to be read as `StoredTensors`. It runs where they are gathered, so it can be
    pickled.
    """

    storage: Storage
    folder: str

    def __call__(self, weights: Iterator[tuple[str, Tensor]]) -> tuple[str, ...]:
        """Write the weights, whole tensors of any shape by name, one at a time. Returns the names of the files.

        Raises `OSError` if they cannot be written.
        """
        files: list[str] = []
        held: list[TensorShard] = []
        for name, weight in weights:
            held.append(TensorShard.whole(f"model.{name}", weight).copied())
            if sum(shard.numbers.nbytes for shard in held) >= FILE_BYTES:
                files.append(self._write(held, len(files)))
                held = []
        return (*files, *([self._write(held, len(files))] if held else ()))

    def _write(self, held: list[TensorShard], number: int) -> str:
        return write_shards(held, self.storage, self.folder, f"{number}.safetensors").name
