"""The learner's end of each transport: takes the weights one by one and sends them with their digests.

A sender runs where the weights are gathered, in the process of the learner's first rank, so it can be pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from attrs import frozen
from safetensors.torch import save
from torch import Tensor

from skyrl.storage.modes import save_tensors
from skyrl.storage.places import is_address, storage_at
from skyrl.weight_receiver.incoming_weights import DeltaFiles, as_bytes, digest
from skyrl.weight_receiver.transfer_group import TransferGroup

Weights = Iterator[tuple[str, Tensor]]

BUCKET_BYTES = 256 * 2**20
"""Size in bytes of weights that are sent together: large enough to fill a connection, small compared with a model."""


@frozen(kw_only=True)
class BroadcastSender:
    """Sends to every engine of the group at once; `incoming_weights.BroadcastWeights` is the other end."""

    group: TransferGroup
    dtype: str
    """Dtype to which weights are rounded before they are sent."""

    def __call__(self, weights: Weights) -> None:
        """Send the weights. Raises `WeightSyncError` if an engine does not join or leaves."""
        with self.group.join() as channel:
            for bucket in buckets(weights, self.dtype):
                channel.send_bytes(_encoded({name: digest(tensor) for name, tensor in bucket.items()}))
                channel.send_bytes(*map(as_bytes, bucket.values()))
            channel.send_bytes(_encoded({}))


@frozen(kw_only=True)
class FolderSender:
    """Writes files that engines read; `incoming_weights.FolderWeights` is the other end."""

    path: str
    """An empty folder."""

    dtype: str

    def __call__(self, weights: Weights) -> None:
        """Write one `NNNNN.safetensors` per bucket, then its digests beside it as JSON."""
        for number, bucket in enumerate(buckets(weights, self.dtype)):
            file = Path(self.path) / f"{number:05}.safetensors"
            save_tensors(bucket, file)
            digests = {name: digest(tensor) for name, tensor in bucket.items()}
            file.with_suffix(".json").write_text(json.dumps(digests), encoding="utf-8")


@frozen(kw_only=True)
class DeltaSender:
    """Writes the weights that differ from a base version; `incoming_weights.DeltaWeights` reads them."""

    path: str
    """The folder that holds the files of the base, or its address in an object store."""

    dtype: str

    prefix: str
    """Prefix of the names of new files, which no earlier file has."""

    base: DeltaFiles
    """Files of the last transfer, with digests; empty to write all weights."""

    def __call__(self, weights: Weights) -> dict[str, dict[str, str]]:
        """Write the changed weights. Returns the files of the new version, with digests: files of the base in which
        weights are still current, and new ones.
        """
        known = {name: (file, stored) for file, digests in self.base.items() for name, stored in digests.items()}
        files: dict[str, dict[str, str]] = {}
        for number, bucket in enumerate(buckets(self._changed(weights, known, files), self.dtype)):
            file = f"{self.prefix}-{number:05}.safetensors"
            self._store(file, bucket)
            files[file] = {name: digest(tensor) for name, tensor in bucket.items()}
        return files

    def _store(self, file: str, bucket: dict[str, Tensor]) -> None:
        if is_address(self.path):
            storage_at(self.path).write(file, [save(bucket)])
        else:
            save_tensors(bucket, Path(self.path) / file)

    def _changed(
        self, weights: Weights, known: Mapping[str, tuple[str, str]], files: dict[str, dict[str, str]]
    ) -> Weights:
        """Rounded tensors whose digest differs from `known`; the others are added to `files` under their old file."""
        for name, tensor in weights:
            rounded = tensor.detach().to("cpu", getattr(torch, self.dtype)).contiguous()
            file, before = known.get(name, ("", ""))
            if before == digest(rounded):
                files.setdefault(file, {})[name] = before
            else:
                yield name, rounded


def buckets(
    weights: Weights, dtype: str, bucket_bytes: int = BUCKET_BYTES, *, device: str = "cpu"
) -> Iterator[dict[str, Tensor]]:
    """The weights in order, each with its whole shape, rounded to `dtype`, on `device`, in non-empty buckets of about
    `bucket_bytes` bytes.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        bucket[name] = tensor.detach().to(device, getattr(torch, dtype)).contiguous()
        size += bucket[name].nbytes
        if size >= bucket_bytes:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


def _encoded(header: dict[str, str]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
