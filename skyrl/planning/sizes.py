"""Lays out a run's processes from their number and sizes: `layout(sizes)`.

Three arrangements: everything on the same GPUs, taking turns (`colocate_all`); the trained and scoring models together
and engines elsewhere (`colocate_policy_ref`); or every model on separate GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from skyrl.planning.layout import Layout, Pool, RankPlacement, counted
from skyrl.planning.topology import MOST_PROCESSES, EngineSizes, Grid, Sizes


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
    if engines is not None:
        parts += _engines(engines, sizes.gpus_per_node)
    return _joined(parts)


def layout_of_engines(sizes: Sizes) -> Layout:
    """The pools and placements of a run that samples without training: each engine has separate GPUs."""
    return _joined([] if sizes.engines is None else list(_engines(sizes.engines, sizes.gpus_per_node)))


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
        wanted = f"{counted(engines.number, 'engine')} of {counted(engines.gpus, 'GPU')}"
        raise ValueError(f"{wanted} cannot share {counted(grid.ranks, 'GPU')}")
    name = "+".join([*models, *(["engine"] if engines else [])])
    placements = [
        RankPlacement(role=role, rank=rank, pool=name, gpus=(rank,)) for role in models for rank in range(grid.ranks)
    ]
    for number in range(engines.number if engines else 0):
        placements.append(_engine(number, name, first=number * engines.gpus, gpus=engines.gpus))  # type: ignore[union-attr]  # an engine has a size here
    return Layout(
        pools=(Pool(name=name, nodes=grid.nodes, gpus_per_node=grid.gpus_per_node),), placements=tuple(placements)
    )


def layout_of_engine(engines: EngineSizes, number: int, gpus_per_node: int) -> Layout:
    """The pool and the placement of one engine with separate GPUs."""
    nodes = (
        1 if engines.on_one_node or engines.gpus <= gpus_per_node else engines.pipeline * _parts(engines, gpus_per_node)
    )
    name = f"engine-{number}"
    pool = Pool(name=name, nodes=nodes, gpus_per_node=engines.gpus // nodes)
    return Layout(pools=(pool,), placements=(_engine(number, name, first=0, gpus=engines.gpus),))


def _engines(engines: EngineSizes, gpus_per_node: int) -> Iterator[Layout]:
    """The layouts of engines with one pool each."""
    for number in range(engines.number):
        yield layout_of_engine(engines, number, gpus_per_node)


def _parts(engines: EngineSizes, gpus_per_node: int) -> int:
    """Number of nodes over which one pipeline stage is spread: the fewest that hold equal parts of it."""
    stage = engines.tensor * engines.data
    return next(parts for parts in range(1, stage + 1) if stage % parts == 0 and stage // parts <= gpus_per_node)


def _engine(number: int, pool: str, *, first: int, gpus: int) -> RankPlacement:
    return RankPlacement(role="engine", rank=number, pool=pool, gpus=tuple(range(first, first + gpus)))
