"""From rank 0 to every rank: what only one process has read, or was given. All functions here are collective."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl.errors import ResumeError
from skyrl.learners.ranks import Ranks


def announced(value: Any, ranks: Ranks) -> Any:
    """What rank 0 says, on every rank. It travels as JSON."""
    if ranks.size == 1:
        return value
    said = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8) if ranks.rank == 0 else torch.empty(0)
    length = torch.tensor([said.numel()])
    dist.broadcast(length, 0)
    text = said if ranks.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return json.loads(bytes(text.tolist()))


def whole(tensor: Tensor | None, like: Tensor, device: torch.device, ranks: Ranks) -> Tensor:
    """Rank 0's `tensor` on every rank, with the shape and type of `like`, on `device`; elsewhere `tensor` is None."""
    if ranks.size == 1:
        assert tensor is not None
        return tensor
    copy = torch.empty(like.shape, dtype=like.dtype, device=device)
    if tensor is not None:
        copy.copy_(tensor)
    dist.broadcast(copy, 0)
    return copy


def write_into(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a plain one, or into this rank's shard of a distributed one."""
    if not isinstance(target, DTensor):
        target.copy_(value)
        return
    shard = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(shard.to_local())


def check_complete(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], ranks: Ranks) -> list[str]:
    """Names of what rank 0 was given, on every rank. Raises `ResumeError` there if it is not a state of this model.

    `wanted` are the weights by name; their shapes are those of the whole tensors.
    """
    shapes = announced({name: list(tensor.shape) for name, tensor in tensors.items()}, ranks)
    for name, weight in wanted.items():
        found = shapes.get(f"model.{name}")
        if found != list(weight.shape):
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
