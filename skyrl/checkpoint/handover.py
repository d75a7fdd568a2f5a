"""Hands the weights of one model to another through files, regardless of how each is sharded over its ranks."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen
from torch import Tensor

from skyrl.checkpoint.shards import TensorShard, write_shards
from skyrl.storage.disk import Storage

FILE_BYTES = 1 << 30
"""Number of bytes gathered in memory before a file is written; a larger tensor is still gathered whole."""


@frozen(kw_only=True)
class WeightFiles:
    """Stores whole weights in a folder, to be read as `StoredTensors`. It runs in the process that gathers them, so it
    can be pickled.
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
