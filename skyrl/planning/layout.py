"""Assigns processes to GPUs, and pools of GPUs to machines that have enough of them.

A `Layout` is a list of pools (GPUs reserved together) and of placements (processes, and their GPUs in a pool).
`layout(sizes)` makes it from the number of a run's processes and their sizes, in one of three arrangements: everything
on the same GPUs, taking turns (`colocate_all`); the trained and scoring models together and engines elsewhere
(`colocate_policy_ref`); or every model on separate GPUs. `assign` finds machines for the pools. On machines without
GPUs, each GPU of a layout means a slot for one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from attrs import evolve, frozen

from skyrl.planning.topology import MOST_PROCESSES, EngineSizes, Grid, Sizes

SHARES = 10_000
"""Number of parts into which Ray divides a GPU; every share of a GPU is a whole number of parts."""

_NODES_SHOWN = 8


@frozen(kw_only=True)
class Pool:
    """GPUs that are reserved together: `nodes` machines with `gpus_per_node` each."""

    name: str
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """Number of GPUs on all nodes of the pool."""
        return self.nodes * self.gpus_per_node


@frozen(kw_only=True)
class RankPlacement:
    """One process of a role, and the GPUs of its pool that it computes on."""

    role: str
    """Role of the process: policy, critic, ref, teacher or engine."""

    rank: int
    """Rank among the processes of the role, or the engine's number."""

    pool: str
    gpus: tuple[int, ...]
    """Indices in the pool, counted node by node: node * gpus_per_node + gpu."""


@frozen(kw_only=True)
class Layout:
    """All the GPUs of a run, and the processes that compute on them."""

    pools: tuple[Pool, ...]
    placements: tuple[RankPlacement, ...]

    @property
    def gpus(self) -> int:
        """Number of GPUs of all pools."""
        return sum(pool.gpus for pool in self.pools)

    def pool(self, name: str) -> Pool:
        """The pool with this name. Raises KeyError if there is none."""
        return {pool.name: pool for pool in self.pools}[name]

    def placements_of(self, role: str) -> tuple[RankPlacement, ...]:
        """The placements of a role, in order of ranks; empty if the run has no such role."""
        return tuple(placed for placed in self.placements if placed.role == role)

    def places(self, placed: RankPlacement) -> tuple[tuple[int, int], ...]:
        """(node of the pool, GPU on that node) of each GPU of a placement, in order."""
        per_node = self.pool(placed.pool).gpus_per_node
        return tuple(divmod(gpu, per_node) for gpu in placed.gpus)

    def share(self, pool: str) -> float:
        """Share of a GPU that each process of this pool may take, so that all processes on the GPU fit: 1.0 for a
        single process, else 1/n rounded down to a ten-thousandth, Ray's unit.
        """
        on_a_gpu = Counter(gpu for placed in self.placements if placed.pool == pool for gpu in placed.gpus)
        return SHARES // max(on_a_gpu.values()) / SHARES


def layout(sizes: Sizes) -> Layout:
    """The pools and placements of a run; a shared pool is named after the roles that share it, such as `policy+ref`.

    An engine has consecutive GPUs. On shared GPUs it stays on one node if its size divides the node's; on separate GPUs
    it gets one node if it fits, else equal parts of the fewest nodes that hold each pipeline stage evenly.

    Raises ValueError if models that share GPUs have different numbers of them, and above `MOST_PROCESSES`.
    """
    models, engines = sizes.models, sizes.engines
    if sizes.processes > MOST_PROCESSES:
        raise ValueError(f"{sizes.processes} ranks and GPUs of engines, but at most {MOST_PROCESSES} are laid out")
    if engines is not None and sizes.colocate_all:
        return _shared(models, engines)
    together = sizes.colocate_all or sizes.colocate_policy_ref
    parts = [_shared(models)] if together else [_shared({role: grid}) for role, grid in models.items()]
    return _joined([*parts, layout_of_engines(sizes)])


def layout_of_engines(sizes: Sizes) -> Layout:
    """The pools and placements of a run that samples without training: each engine has separate GPUs."""
    engines, per_node = sizes.engines, sizes.gpus_per_node
    if engines is None:
        return Layout(pools=(), placements=())
    return _joined([layout_of_engine(engines, number, per_node) for number in range(engines.number)])


def _joined(parts: Sequence[Layout]) -> Layout:
    return Layout(
        pools=tuple(pool for part in parts for pool in part.pools),
        placements=tuple(placed for part in parts for placed in part.placements),
    )


def _shared(models: Mapping[str, Grid], engines: EngineSizes | None = None) -> Layout:
    """One pool that all given models and engines share."""
    [grid, *others] = models.values()
    if any(other != grid for other in others):
        raise ValueError(f"models that share GPUs must have the same number of them, not {models}")
    if engines is not None and engines.number * engines.gpus != grid.ranks:
        requirement = f"{counted(engines.number, 'engine')} of {counted(engines.gpus, 'GPU')}"
        raise ValueError(f"{requirement} cannot share {counted(grid.ranks, 'GPU')}")
    name = "+".join([*models, *(["engine"] if engines else [])])
    placements = [
        RankPlacement(role=role, rank=rank, pool=name, gpus=(rank,)) for role in models for rank in range(grid.ranks)
    ]
    if engines:
        gpus = engines.gpus
        placements += (_engine(number, name, first=number * gpus, gpus=gpus) for number in range(engines.number))
    pool = Pool(name=name, nodes=grid.nodes, gpus_per_node=grid.gpus_per_node)
    return Layout(pools=(pool,), placements=tuple(placements))


def layout_of_engine(engines: EngineSizes, number: int, gpus_per_node: int) -> Layout:
    """The pool and the placement of one engine with separate GPUs."""
    nodes, stage = 1, engines.tensor * engines.data
    if not engines.on_one_node and engines.gpus > gpus_per_node:  # the fewest that hold equal parts of each stage
        fitting = (parts for parts in range(1, stage + 1) if stage % parts == 0 and stage // parts <= gpus_per_node)
        nodes = engines.pipeline * next(fitting)
    name = f"engine-{number}"
    pool = Pool(name=name, nodes=nodes, gpus_per_node=engines.gpus // nodes)
    return Layout(pools=(pool,), placements=(_engine(number, name, first=0, gpus=engines.gpus),))


def _engine(number: int, pool: str, *, first: int, gpus: int) -> RankPlacement:
    return RankPlacement(role="engine", rank=number, pool=pool, gpus=tuple(range(first, first + gpus)))


@frozen(kw_only=True)
class ClusterNode:
    """A machine of a cluster."""

    id: str
    gpus: int
    """Free GPUs; on a machine without GPUs, free slots for processes."""

    name: str = ""
    """Name in messages; if empty, the id is used."""


Assignment = Mapping[str, tuple[str, ...]]
"""Pool name -> ids of distinct machines, one for each node of the pool."""


class NoRoom(ValueError):
    """Error for a layout that does not fit on a cluster.

    `pool` is the first one that does not fit, and `free` are the machines with the GPUs that earlier pools left free.
    """

    def __init__(self, pool: Pool, free: tuple[ClusterNode, ...], layout: Layout, total: int, unit: str) -> None:
        self.pool, self.free, self.layout, self.total, self.unit = pool, free, layout, total, unit
        super().__init__(pool, free, layout, total, unit)

    def __str__(self) -> str:
        fitting = sum(node.gpus >= self.pool.gpus_per_node for node in self.free)
        placed = sum(node.gpus for node in self.free) < self.total
        shown = [f"{node.name or node.id}: {node.gpus}" for node in self.free[:_NODES_SHOWN]]
        if len(self.free) > len(shown):
            shown.append(f"and {len(self.free) - len(shown)} more")
        return (
            f"{self.pool.name} needs {counted(self.pool.nodes, 'node')} with "
            f"{counted(self.pool.gpus_per_node, f'free {self.unit}')}, the cluster has {fitting}"
            f"{' left' if placed else ''} ({', '.join(shown) or 'no nodes'}); "
            f"all in all the run needs {counted(self.layout.gpus, self.unit)}, and {self.total} are free"
        )


def assign(layout: Layout, nodes: Sequence[ClusterNode], unit: str = "GPU") -> Assignment:
    """Machines for every pool; several pools may share a machine whose free GPUs suffice for all of them.

    Pools that need most of a machine come first, and each goes to the machines that it fills best, so that whole
    machines stay free for pools that need them. If a pool does not fit in this order, other orders are tried. The
    result is deterministic. Raises `NoRoom`, which describes the failure of the first order; `unit` is the message's
    word for a GPU, such as "slot" on machines without GPUs.
    """
    refusals = []
    for widest_first, loose, wide_loose in product((False, True), repeat=3):
        try:
            return _assign(layout, nodes, unit, widest_first=widest_first, loose=loose, wide_loose=wide_loose)
        except NoRoom as refusal:
            refusals.append(refusal)
    raise refusals[0]


def on_machines(layout: Layout, assignment: Assignment) -> dict[RankPlacement, tuple[tuple[str, int], ...]]:
    """Placement -> (machine, GPU on it) of each of its GPUs; pools that share a machine take its GPUs consecutively."""
    used: dict[str, int] = {}
    first: dict[str, list[int]] = {}
    for pool in layout.pools:
        first[pool.name] = [used.get(node, 0) for node in assignment[pool.name]]
        used.update({node: used.get(node, 0) + pool.gpus_per_node for node in assignment[pool.name]})
    sizes = {pool.name: pool.gpus_per_node for pool in layout.pools}
    return {
        placed: tuple(
            (assignment[placed.pool][node], first[placed.pool][node] + gpu)
            for node, gpu in (divmod(gpu, sizes[placed.pool]) for gpu in placed.gpus)
        )
        for placed in layout.placements
    }


def _assign(
    layout: Layout, nodes: Sequence[ClusterNode], unit: str, *, widest_first: bool, loose: bool, wide_loose: bool
) -> Assignment:
    """Assign pools in one order. A pool of one node takes the fullest machine that holds it (`loose`: the emptiest); a
    pool of several nodes takes the fullest ones (`wide_loose`: the emptiest).
    """
    free = {node.id: node.gpus for node in nodes}
    assignment: dict[str, tuple[str, ...]] = {}
    for pool in sorted(
        layout.pools,
        key=lambda pool: (pool.nodes, pool.gpus_per_node) if widest_first else (pool.gpus_per_node, pool.nodes),
        reverse=True,
    ):
        fitting = [name for name, gpus in free.items() if gpus >= pool.gpus_per_node]
        if len(fitting) < pool.nodes:
            left = tuple(evolve(node, gpus=free[node.id]) for node in nodes)
            raise NoRoom(pool, left, layout, sum(node.gpus for node in nodes), unit)
        emptiest = wide_loose if pool.nodes > 1 else loose
        chosen = set(sorted(fitting, key=free.__getitem__, reverse=emptiest)[: pool.nodes])
        for name in chosen:
            free[name] -= pool.gpus_per_node
        assignment[pool.name] = tuple(name for name in free if name in chosen)
    return assignment


def ranges(numbers: Iterable[int], separator: str = ", ") -> str:
    """Ascending numbers as text, with consecutive ones as a range: `0-3, 6`."""
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and stretches[-1][-1] + 1 == number:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    return separator.join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in stretches)


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun in singular or plural: `1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"
