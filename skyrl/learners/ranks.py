"""The ranks of one role, which compute together, and how they find each other.

The driver makes a `Rendezvous`, which hosts a store on its own socket, and hands one `Ranks` to each process.
`Ranks.join()` there makes the process group for all collective operations of this package. A single rank needs neither.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch exports them
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from skyrl.errors import ProcessError
from skyrl.models.attention.shared_rows import ContextGroup, RowSharing, SequenceGroup
from skyrl.planning.replicas import Replicas
from skyrl.processes.addresses import connecting_seconds

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
"""Names of the dimensions of a device mesh, in its order."""

EXPERT = "expert"
"""Name of the last dimension of the mesh of experts, after `shard`."""

_members = 0
"""Number of roles of this process that have joined its process group."""


@frozen(kw_only=True)
class Ranks:
    """One process among the ranks of its role. Picklable, so that it can be sent to the process that it describes."""

    rank: int = 0
    size: int = 1

    reports: bool = True
    """Whether this rank returns the scores of its replica. False if another rank of the same rows does."""

    store: tuple[str, int] | None = None
    """Host and port of the driver's store. None for a single rank."""

    name: str = "policy"
    """Name of the role: roles share a store, each under its own prefix."""

    timeout: float = 600.0
    """Seconds that a rank waits for the others, when connecting and in every collective operation."""

    def join(self, device: torch.device) -> None:
        """Make this process a member of the default process group: gloo on a CPU, NCCL with gloo for CPU tensors on
        CUDA. Roles of one process share the group; they must have the same rank and number of ranks.

        Returns when all ranks have joined. Raises `ProcessError` if the store cannot be reached or a rank is missing.
        """
        global _members
        if dist.is_initialized():
            assert (dist.get_rank(), dist.get_world_size()) == (self.rank, self.size), "one process, one rank"
        else:
            patience = timedelta(seconds=self.timeout)
            try:
                dist.init_process_group(
                    "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                    store=self._open_store(patience),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=patience,
                    device_id=device if device.index is not None else None,
                )
                dist.barrier()
            except (dist.DistError, RuntimeError) as error:
                where = ":".join(map(str, self.store)) if self.store else "memory"
                raise ProcessError(
                    f"rank {self.rank} of the {self.size} {self.name} ranks, on {socket.gethostname()}, did not meet "
                    f"the others through the store at {where} within {self.timeout:g} s: {str(error).splitlines()[0]}"
                ) from error
        _members += 1

    def _open_store(self, patience: timedelta) -> Store:
        if self.store is None:
            assert self.size == 1, f"{self.size} ranks need a store to meet at"
            return HashStore()
        host, port = self.store
        connecting = timedelta(seconds=connecting_seconds(self.timeout))
        store = TCPStore(host, port, is_master=False, timeout=connecting)
        store.set_timeout(patience)
        return PrefixStore(self.name, store)

    def leave(self) -> None:
        """Undo one `join`; the last call destroys the process group and clears torch's cache of sharding decisions,
        whose entries refer to destroyed groups and would be reused for an equal mesh of new groups.
        """
        global _members
        _members -= 1
        if not _members:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()

    def mesh(self, device: torch.device, *, shard_size: int = -1, tensor: int = 1) -> DeviceMesh:
        """Mesh with dimensions `replicate`, `shard` and `tensor`: `tensor` consecutive ranks cut matrices among them;
        weights are sharded over `shard_size` such groups (-1: all of them), and replicated beyond that. `shard` always
        exists, the other dimensions only if they have more than one rank.

        Raises ValueError if the sizes do not divide the number of ranks.
        """
        copies = self._divided(tensor, "tensor_parallel_size")
        shard = copies if shard_size == -1 else shard_size
        if copies % shard:
            raise ValueError(f"fsdp_size = {shard} does not divide {copies} ranks")
        sizes = {REPLICATE: copies // shard, SHARD: shard, TENSOR: tensor}
        kept = {name: size for name, size in sizes.items() if name == SHARD or size > 1}
        return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))

    def expert_mesh(self, device: torch.device, experts: int) -> DeviceMesh:
        """Mesh with dimensions `shard` and `expert`: `experts` consecutive ranks hold different experts, which are
        sharded over the ranks that hold the same ones. Raises ValueError if the size does not divide the number of
        ranks.
        """
        copies = self._divided(experts, "expert_parallel_size")
        return init_device_mesh(device.type, (copies, experts), mesh_dim_names=(SHARD, EXPERT))

    def row_sharing(self, *, sequence: int = 1, context: int = 1, tensor: int = 1) -> RowSharing | None:
        """The `context` x `sequence` ranks that share packed rows with this one; None if it is alone. Collective.

        `tensor` consecutive ranks have parts of the same matrices; `sequence` consecutive groups of these exchange
        tokens for heads; `context` consecutive groups of those gather keys and values. Raises ValueError if the sizes
        do not divide the number of ranks.
        """
        together = sequence * context
        if together == 1:
            return None
        replicas = self._divided(together * tensor, "sequence x context x tensor parallel size")
        ranks = torch.arange(self.size).view(replicas, context, sequence, tensor)
        everyone = SequenceGroup(self._group(ranks.flatten(1, 2).transpose(1, 2).reshape(-1, together)))
        heads = everyone if context == 1 else None
        if 1 not in (sequence, context):
            heads = SequenceGroup(self._group(ranks.transpose(2, 3).reshape(-1, sequence)))
        keys = None
        if context > 1:
            keys = ContextGroup(
                everyone.group if sequence == 1 else self._group(ranks.movedim(1, 3).reshape(-1, context))
            )
        return RowSharing(everyone=everyone, sequence=heads, context=keys)

    def _group(self, groups: Tensor) -> dist.ProcessGroup:
        """The process group of this rank, where each row of `groups` lists the ranks of a group."""
        result = dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timedelta(seconds=self.timeout))
        group: dist.ProcessGroup = result[0]
        return group

    def _divided(self, by: int, name: str) -> int:
        count, rest = divmod(self.size, by)
        if rest:
            raise ValueError(f"{name} = {by} does not divide {self.size} ranks")
        return count


ALONE = Ranks()
"""The ranks of a role with a single process."""


class Rendezvous:
    """A store, hosted by the driver, through which ranks connect. It listens on loopback by default."""

    def __init__(self, host: str = "127.0.0.1", *, timeout: float = 600.0) -> None:
        """`host` is an address of this machine that every rank can reach; `timeout` is in seconds, as in `Ranks`."""
        self._timeout = timeout
        listener = socket.create_server((host, 0), backlog=1024)  # bound here, so that no other process can have it
        self.address: tuple[str, int] = (host, listener.getsockname()[1])
        self._store: TCPStore | None = TCPStore(
            host,
            self.address[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )

    def ranks(self, name: str, size: int, replicas: Replicas | None = None) -> tuple[Ranks, ...]:
        """The ranks of one role. A name can be used once: a second group under the same name would join the first.

        `replicas` says which of the ranks compute on the same rows; by default each rank has its own rows.
        """
        reporting = range(size) if replicas is None else replicas.reporting
        return tuple(
            Ranks(
                rank=rank,
                size=size,
                reports=rank in reporting,
                store=self.address,
                name=name,
                timeout=self._timeout,
            )
            for rank in range(size)
        )

    def close(self) -> None:
        """Stop listening. Connected ranks no longer need the store."""
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
