"""Groups of ranks for tensor parallelism, in the form that DeepSpeed expects, and the parts of cut matrices."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from skyrl.checkpoint.shards import TensorSource
from skyrl.learners.ranks import SHARD, TENSOR


@frozen(eq=False)
class ParallelUnit:
    """The object that DeepSpeed and Megatron call `mpu`, with the methods that DeepSpeed uses."""

    mesh: DeviceMesh
    """Its dimensions are `shard`, the ranks with the same part of every matrix, and `tensor`."""

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """This rank's group of ranks that cut matrices among them."""
        return self.mesh.get_group(TENSOR)

    def get_model_parallel_world_size(self) -> int:
        """Number of ranks that cut matrices among them."""
        return self.mesh.size(list(self.mesh.mesh_dim_names or ()).index(TENSOR))

    def get_model_parallel_rank(self) -> int:
        """Index of this rank among the ranks that cut matrices, counted from 0."""
        return self.mesh.get_local_rank(TENSOR)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks with the same part of every matrix, over which gradients are averaged and state is sharded."""
        return self.mesh.get_group(SHARD)

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks with the same part of every matrix."""
        return self.get_data_parallel_group().size()

    def get_data_parallel_rank(self) -> int:
        """Index of this rank among the ranks with the same part of every matrix, counted from 0."""
        return self.mesh.get_local_rank(SHARD)


@frozen(eq=False)
class Cut:
    """One of the equal parts of a tensor along a dimension, and the ranks that have the others."""

    dim: int
    group: dist.ProcessGroup

    def whole_shape(self, own: torch.Size) -> torch.Size:
        """Shape of the whole tensor, given the shape `own` of a part."""
        return torch.Size(n * self.group.size() if dim == self.dim else n for dim, n in enumerate(own))

    def gathered(self, own: Tensor) -> Tensor:
        """The whole tensor on every rank. Collective."""
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.group.size())]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts, dim=self.dim)

    def start_of(self, own: torch.Size) -> int:
        """Index of the part's first number in the flattened whole. The part must consist of whole rows (`dim` 0)."""
        assert self.dim == 0
        return self.group.rank() * own.numel()

    def read(self, source: TensorSource, name: str, own: torch.Size, start: int, count: int) -> Tensor:
        """(count,): numbers from `start` of the flattened part of shape `own`, read from the whole stored tensor."""
        if self.dim == 0:
            return source.read(name, self.start_of(own) + start, count)
        width = own[1:].numel()
        whole_width, first_column = width * self.group.size(), width * self.group.rank()
        first, last = start // width, math.ceil((start + count) / width)
        rows = source.read(name, first * whole_width, (last - first) * whole_width).view(-1, whole_width)
        return rows[:, first_column : first_column + width].reshape(-1)[start - first * width :][:count]
