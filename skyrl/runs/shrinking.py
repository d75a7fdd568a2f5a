"""A smaller layout for a run that has lost ranks or machines (`trainer.faults.on_lost_rank = "shrink"`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from skyrl.config.loading.check import check
from skyrl.config.loading.kinds import kind_of, samples_rollouts
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.supervised_root import SupervisedConfig
from skyrl.planning.topology import Grid
from skyrl.tree import evolve_at, get_at

R = TypeVar("R", bound=SkyRLTrainConfig | SupervisedConfig)

_ENGINES = "generator.inference_engine.num_engines"


def shrunk(run: R, role: str, *, by_machine: bool = False) -> tuple[R, dict[str, int]] | None:
    """The resolved run with the next smaller number of ranks that passes every check, and the changed paths with their
    new values. None if no smaller number passes.

    `role` (policy, critic, ref, teacher or engine) loses ranks, together with the models that share its GPUs; of
    engines with GPUs of their own, one is removed. `by_machine` removes a whole machine where the model has several.
    """
    for changes in _smaller(run, role, by_machine=by_machine):
        smaller = run
        if samples_rollouts(run):
            smaller = evolve_at(smaller, "trainer.placement.allocation", None)  # the fields already hold its values
        for path, value in changes.items():
            smaller = evolve_at(smaller, path, value)
        if not any(problem.severity == "error" for problem in check(smaller)):
            return smaller, changes
    return None


def _smaller(run: SkyRLTrainConfig | SupervisedConfig, role: str, *, by_machine: bool) -> Iterator[dict[str, int]]:
    """Changes that make the run smaller, those that remove the least first."""
    if samples_rollouts(run) and role == "engine" and not run.trainer.placement.colocate_all:
        for number in range(run.generator.inference_engine.num_engines - 1, 0, -1):
            yield {_ENGINES: number}
        return
    roles, sizes = kind_of(run).roles, kind_of(run).sizes(run)
    together = sizes.colocate_all or sizes.colocate_policy_ref or len(roles) == 1
    tables = [model.placement for model in roles if (model.exists(run) if together else model.name == role)]
    nodes, gpus = (get_at(run, f"{tables[0]}{name}") for name in ("num_nodes", "num_gpus_per_node"))
    before = Grid(nodes=nodes, gpus_per_node=gpus)
    for grid in _grids_within(before, by_machine=by_machine):
        changes: dict[str, int] = {}
        for table in tables:
            changes |= {f"{table}num_nodes": grid.nodes, f"{table}num_gpus_per_node": grid.gpus_per_node}
        if sizes.engines is not None and sizes.colocate_all:  # engines with GPUs of their own stay
            changes[_ENGINES] = max(1, grid.ranks // sizes.engines.gpus)
        yield changes


def _grids_within(grid: Grid, *, by_machine: bool) -> list[Grid]:
    """Smaller grids, the largest first; of grids of one size, the one on fewer machines first."""
    most = grid.nodes - 1 if by_machine and grid.nodes > 1 else grid.nodes
    sizes = [
        Grid(nodes=nodes, gpus_per_node=item)
        for nodes in range(1, most + 1)
        for item in range(1, grid.gpus_per_node + 1)
    ]
    return sorted((size for size in sizes if size.ranks < grid.ranks), key=lambda size: (-size.ranks, size.nodes))
