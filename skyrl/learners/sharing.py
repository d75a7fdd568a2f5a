"""Whole tensors and what a rank holds of them: from rank 0 to every rank, into files, and out of files."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl.checkpoint.shards import TensorShard, TensorSource
from skyrl.errors import ResumeError
from skyrl.learners.ranks import Ranks


def whole(tensor: Tensor | None, like: Tensor, device: torch.device, ranks: Ranks) -> Tensor:
    """Rank 0's `tensor` on every rank, with the shape and type of `like`, on `device`; elsewhere `tensor` is None.
    Collective.
    """
    if ranks.size == 1:
        assert tensor is not None
        return tensor
    copy = torch.empty(like.shape, dtype=like.dtype, device=device)
    if tensor is not None:
        copy.copy_(tensor)
    dist.broadcast(copy, 0)
    return copy


def write_into(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a plain one of its shape, or into this rank's shard of a distributed one."""
    _local(target).copy_(_share_of(value, target))


def add_into(target: Tensor, value: Tensor) -> None:
    """Add a whole tensor to a plain one of its shape, or to this rank's shard of a distributed one."""
    _local(target).add_(_share_of(value, target))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _share_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, where `like` is spread over ranks."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()


def piece_of(name: str, tensor: Tensor, ranks: Ranks) -> TensorShard | None:
    """This rank's stored part of a tensor of any shape: its shard, or, on rank 0, all of one that every rank has."""
    if not isinstance(tensor, DTensor):
        return TensorShard.whole(name, tensor) if ranks.rank == 0 else None
    start, is_first_copy = _shard_of(tensor)
    numbers = tensor.to_local()
    if not is_first_copy or not numbers.numel():
        return None
    return TensorShard(name=name, shape=tuple(tensor.shape), start=start, numbers=numbers)


def read_into(target: Tensor, source: TensorSource, name: str) -> None:
    """Fill a plain tensor of any shape, or this rank's shard of a distributed one."""
    if isinstance(target, DTensor):
        local = target.to_local()
        local.copy_(source.read(name, _shard_of(target)[0], local.numel()).view(local.shape))
    else:
        target.copy_(source.read(name).view(target.shape))


def _shard_of(tensor: DTensor) -> tuple[int, bool]:
    """Number of the whole tensor that this rank's shard begins with, and whether no rank before has the same shard.

    FSDP2 gives a rank consecutive rows, as many as `torch.chunk` does.
    """
    mesh = tensor.device_mesh
    start, is_first_copy = 0, True
    for dimension, (placement, mine) in enumerate(zip(tensor.placements, mesh.get_coordinate() or (), strict=True)):
        if placement.is_shard():
            assert placement.is_shard(0), "rows are sharded"
            rows = -(-tensor.shape[0] // mesh.size(dimension))
            start = min(rows * mine, tensor.shape[0]) * math.prod(tensor.shape[1:])
        else:
            is_first_copy = is_first_copy and mine == 0
    return start, is_first_copy


def check_complete(source: TensorSource, wanted: Mapping[str, Tensor]) -> list[str]:
    """Names of what there is. Raises `ResumeError` if it is not a state of this model.

    `wanted` are the weights by name; their shapes are those of the whole tensors.
    """
    shapes = source.shapes
    for name, weight in wanted.items():
        found = shapes.get(f"model.{name}")
        if found != tuple(weight.shape):
            had = "nothing" if found is None else f"shape {tuple(found)}"
            raise ResumeError(
                f"the stored state is not of this model: for {name}, of shape {tuple(weight.shape)}, it holds {had}"
            )
    for parameter in slots_of(list(shapes)):
        if parameter not in wanted:
            raise ResumeError(f"the stored state is not of this model: it has optimizer state of {parameter!r}")
    return list(shapes)


def slots_of(names: list[str]) -> dict[str, list[str]]:
    """Parameter -> the optimizer's slots for it, out of names such as `optimizer.model.norm.weight.exp_avg`."""
    slots: dict[str, list[str]] = {}
    for name in names:
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            parameter, _, slot = rest.rpartition(".")
            slots.setdefault(parameter, []).append(slot)
    return slots
