"""Transfers between whole tensors and the parts that ranks hold: from rank 0 to all ranks, to files, and from files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from skyrl.checkpoint.shards import TensorShard, TensorSource
from skyrl.errors import ResumeError
from skyrl.learners.ranks import TENSOR, Ranks


def full_tensor(tensor: Tensor | None, like: Tensor, device: torch.device, ranks: Ranks) -> Tensor:
    """Rank 0's `tensor` on every rank, with the shape and type of `like`, on `device`; other ranks pass None.
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


def share_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor if `like` is distributed over ranks, else the whole."""
    return value[local_region(like)] if isinstance(like, DTensor) else value


def piece_of(name: str, tensor: Tensor, *, copy: int = 0) -> TensorShard | None:
    """The part of a tensor of any shape that this rank stores: its shard, or on the first rank the whole of a tensor
    that every rank has; None if another rank stores it. `copy` is this rank's index among ranks that hold the same part
    of the tensor without being in its mesh. Collective if a matrix is cut by columns.
    """
    if not isinstance(tensor, DTensor):
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        return TensorShard.from_full_tensor(name, tensor) if copy == 0 and is_first else None
    replicated = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
    is_cut = TENSOR in (tensor.device_mesh.mesh_dim_names or ())
    if any(placement.is_replicate() and coordinate for placement, coordinate in replicated) or (copy and not is_cut):
        return None
    first, numbers = _rows(tensor)
    if not numbers.numel():
        return None
    start = first * math.prod(tensor.shape[1:])
    return TensorShard(name=name, shape=tuple(tensor.shape), start=start, numbers=numbers)


def even_share(name: str, full: Tensor, part: int, parts: int) -> Iterator[TensorShard]:
    """The stretch that rank `part` of `parts` stores of a tensor that all of them have; none behind its last number."""
    size = -(-full.numel() // parts)
    numbers = full.flatten()[size * part : size * (part + 1)]
    if numbers.numel():
        yield TensorShard(name=name, shape=tuple(full.shape), start=size * part, numbers=numbers)


def read_into(target: Tensor, source: TensorSource, name: str) -> None:
    """Fill a plain tensor of any shape, or this rank's shard of a distributed one."""
    if not isinstance(target, DTensor):
        target.copy_(source.read(name).view(target.shape))
        return
    rows, *columns = local_region(target)
    width = math.prod(target.shape[1:])
    values = source.read(name, rows.start * width, (rows.stop - rows.start) * width)
    values = values.view(rows.stop - rows.start, *target.shape[1:])
    target.to_local().copy_(values[(slice(None), *columns)])


def local_region(tensor: DTensor) -> tuple[slice, ...]:
    """The slice of each dimension of a distributed tensor that this rank holds.

    The last dimension of its mesh cuts first: tensor parallelism cuts rows or columns, then FSDP2 cuts the rows of the
    result. Both cut as `torch.chunk` does.
    """
    region = [slice(0, length) for length in tensor.shape]
    mesh = tensor.device_mesh
    cuts = zip(tensor.placements, mesh.shape, mesh.get_coordinate() or (), strict=True)
    for placement, parts, coordinate in reversed(list(cuts)):
        dimension = getattr(placement, "dim", None)
        if dimension is not None:
            extent = region[dimension]
            length = -(-(extent.stop - extent.start) // parts)
            first = min(extent.start + length * coordinate, extent.stop)
            region[dimension] = slice(first, min(first + length, extent.stop))
    return tuple(region)


def _rows(tensor: DTensor) -> tuple[int, Tensor]:
    """The first of the whole rows that this rank stores, and their numbers. A rank that holds only some columns of its
    rows stores a part of these rows, for which the ranks with the other columns send theirs.
    """
    region, own = local_region(tensor), tensor.to_local()
    if own.shape[1:] == tensor.shape[1:]:
        return region[0].start, own
    mesh = tensor.device_mesh[TENSOR]
    rows = DTensor.from_local(own, mesh, [Shard(1)], run_check=False).redistribute(placements=[Shard(0)])
    return region[0].start + local_region(rows)[0].start, rows.to_local()


def check_complete(source: TensorSource, weights: Mapping[str, Tensor]) -> list[str]:
    """Names of all stored tensors. Raises `ResumeError` if the state belongs to another model.

    `weights` are those of the model by name; their shapes are the shapes of the whole tensors.
    """
    shapes = source.shapes
    for name, weight in weights.items():
        shape = shapes.get(f"model.{name}")
        if shape != tuple(weight.shape):
            had = "nothing" if shape is None else f"shape {tuple(shape)}"
            raise ResumeError(
                f"the stored state belongs to another model: for {name}, of shape {tuple(weight.shape)}, it holds {had}"
            )
    for parameter in slots_of(list(shapes)):
        if parameter not in weights:
            raise ResumeError(f"the stored state belongs to another model: it has optimizer state of {parameter!r}")
    return list(shapes)


def slots_of(names: list[str]) -> dict[str, list[str]]:
    """Parameter -> the optimizer's slots for it, from names such as `optimizer.model.norm.weight.exp_avg`."""
    slots: dict[str, list[str]] = {}
    for name in names:
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            parameter, _, slot = rest.rpartition(".")
            slots.setdefault(parameter, []).append(slot)
    return slots
