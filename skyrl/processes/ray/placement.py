"""Places the processes of a run: reserves machines for the pools, and assigns their GPUs by number.

Ray numbers the bundles of a placement group in any order, also across machines. So a bundle holds all resources of a
pool on one machine and is pinned to the machine that `planning` chose, and a seat's GPUs are counted by (machine, GPU):
the number of a bundle has no meaning.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
import ray._private.state
from attrs import frozen
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl.errors import NoRoomError, ProcessError
from skyrl.planning.layout import Assignment, ClusterNode, Layout, NoRoom, Pool, RankPlacement, assign
from skyrl.processes.ray.cluster import Device

_nodes: Any = ray.nodes
_free_by_node: Any = ray._private.state.available_resources_per_node

_RESOURCE = {"cuda": "GPU", "cpu": "slot"}
_LOOK = 1.0


@frozen(kw_only=True)
class Place:
    """Location of a process."""

    node: str
    """Ray's id of the machine: several may share an address."""

    address: str
    port: int
    """Port of Ray on the machine."""

    gpus: tuple[str, ...]
    """The machine's names of the GPUs: numbers or unique ids. For a process on several machines, those of the first. On
    machines without GPUs, slots of the pool."""

    strategy: PlacementGroupSchedulingStrategy


@frozen(kw_only=True)
class Reservation:
    """Resources of a pool on one machine."""

    node: str
    gpus: tuple[str, ...]
    strategy: PlacementGroupSchedulingStrategy


class Placement:
    """The reservations of a layout on the cluster that this process is connected to.

    Raises `NoRoomError` before anything is reserved if the layout does not fit within `patience` seconds, and also if a
    reservation is not granted within `seconds`; both messages say what is missing.
    """

    def __init__(self, layout: Layout, device: Device, seconds: float, *, patience: float = 0.0) -> None:
        self._layout, self._device = layout, device
        self._addresses: dict[str, tuple[str, int]] = {}
        self._groups: dict[str, PlacementGroup] = {}
        assignment = self._assigned(layout, patience)
        deadline = time.monotonic() + seconds
        try:
            self._pools = {pool.name: self._reserve(pool, assignment[pool.name], deadline) for pool in layout.pools}
        except BaseException:
            self.remove()
            raise

    def add(self, more: Layout, seconds: float) -> None:
        """Reserve further pools. Raises `NoRoomError` as the constructor does."""
        assignment, deadline = self._assigned(more, 0.0), time.monotonic() + seconds
        for pool in more.pools:
            try:
                self._pools[pool.name] = self._reserve(pool, assignment[pool.name], deadline)
            except BaseException:
                self._remove(pool.name)
                raise
        before = self._layout
        self._layout = Layout(pools=before.pools + more.pools, placements=before.placements + more.placements)

    def give_back(self, role: str, rank: int) -> None:
        """Release the pool of this process, which it had to itself."""
        before = self._layout
        [gone] = [placed for placed in before.placements if (placed.role, placed.rank) == (role, rank)]
        self._layout = Layout(
            pools=tuple(pool for pool in before.pools if pool.name != gone.pool),
            placements=tuple(placed for placed in before.placements if placed is not gone),
        )
        del self._pools[gone.pool]
        self._remove(gone.pool)

    def _assigned(self, layout: Layout, patience: float) -> Assignment:
        """Machines for every pool; waits up to `patience` seconds for machines to join or to become free."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return assign(layout, self.free(), unit=_RESOURCE[self._device])
            except NoRoom as refusal:
                if time.monotonic() >= deadline:
                    waited = f", for {patience:g} s" if patience else ""
                    message = f"The run does not fit on the Ray cluster{waited}: {refusal}"
                    raise NoRoomError(message, refusal.pool.name) from None
            time.sleep(_LOOK)

    def free(self) -> list[ClusterNode]:
        """The machines of the cluster and their free GPUs or slots, in order of addresses and ids."""
        alive = [node for node in _nodes() if node["Alive"]]
        addresses = {node["NodeID"]: (str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])) for node in alive}
        self._addresses |= addresses
        free, resource = _free_by_node(), _RESOURCE[self._device]
        return [
            ClusterNode(id=node, gpus=int(free.get(node, {}).get(resource, 0)), name=f"{address} ({node[:8]})")
            for (address, _), node in sorted((where, node) for node, where in addresses.items())
        ]

    def place(self, placed: RankPlacement) -> Place:
        """Location of this process."""
        parts = [(self._pools[placed.pool][node], gpu) for node, gpu in self._layout.places(placed)]
        first = parts[0][0]
        return Place(
            node=first.node,
            address=self._addresses[first.node][0],
            port=self._addresses[first.node][1],
            gpus=tuple(part.gpus[gpu] for part, gpu in parts if part is first),
            strategy=first.strategy,
        )

    def is_there(self, place: Place) -> bool:
        """Whether the machine of a process is still in the cluster."""
        return any(node["Alive"] and node["NodeID"] == place.node for node in _nodes())

    def moved(self, role: str, rank: int, seconds: float) -> Place:
        """Another place for a process whose machine is gone and which has a pool to itself. Raises `NoRoomError`."""
        placements = self._layout.placements
        [placed] = [item for item in placements if (item.role, item.rank) == (role, rank)]
        if any(item.pool == placed.pool and item is not placed for item in placements):
            message = f"the machine of {role}-{rank} is gone, and its pool {placed.pool} has other processes"
            raise NoRoomError(message, placed.pool)
        pool = self._layout.pool(placed.pool)
        assignment = self._assigned(Layout(pools=(pool,), placements=(placed,)), 0.0)
        self._remove(pool.name)
        self._pools[pool.name] = self._reserve(pool, assignment[pool.name], time.monotonic() + seconds)
        return self.place(placed)

    def remove(self) -> None:
        """Release all reservations."""
        for pool in list(self._groups):
            self._remove(pool)

    def _remove(self, pool: str) -> None:
        if pool in self._groups:
            remove_placement_group(self._groups.pop(pool))

    def _reserve(self, pool: Pool, nodes: Sequence[str], deadline: float) -> list[Reservation]:
        """Reserve the pool's resources on each of these machines, in their order."""
        group = placement_group(
            [{_RESOURCE[self._device]: float(pool.gpus_per_node)} for _ in nodes],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": node} for node in nodes],
        )
        self._groups[pool.name] = group
        if not group.wait(max(0.0, deadline - time.monotonic())):
            free = ", ".join(f"{node.name}: {node.gpus}" for node in self.free())
            raise NoRoomError(
                f"The Ray cluster did not give {pool.name} its {pool.nodes} x {pool.gpus_per_node} GPUs in time; "
                f"free GPUs by node: {free}",
                pool.name,
            )
        bundles = {node: int(index) for index, node in placement_group_table(group)["bundles_to_node_id"].items()}
        strategies = {
            node: PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundles[node])
            for node in nodes
        }
        gpus = self._numbers(pool, strategies, deadline)
        return [Reservation(node=node, gpus=gpus[node], strategy=strategies[node]) for node in nodes]

    def _numbers(
        self, pool: Pool, strategies: dict[str, PlacementGroupSchedulingStrategy], deadline: float
    ) -> dict[str, tuple[str, ...]]:
        """Each machine's names of the GPUs that it reserved, in order; only a task that holds them can read them."""
        if self._device == "cpu":
            return {node: tuple(str(slot) for slot in range(pool.gpus_per_node)) for node in strategies}
        requests = {
            node: _gpus_of_this_task.options(num_gpus=pool.gpus_per_node, scheduling_strategy=strategy).remote()
            for node, strategy in strategies.items()
        }
        try:
            answers = ray.get(list(requests.values()), timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            raise ProcessError(f"The machines of {pool.name} did not say in time which GPUs they reserved") from None
        return {node: tuple(sorted(gpus, key=_gpu_sort_key)) for node, gpus in zip(requests, answers, strict=True)}


def _gpu_sort_key(gpu: str) -> tuple[int, str]:
    return (int(gpu), gpu) if gpu.isdecimal() else (-1, gpu)


@ray.remote(num_cpus=0, max_retries=0)
def _gpus_of_this_task() -> Any:
    return [str(gpu) for gpu in ray.get_gpu_ids()]
