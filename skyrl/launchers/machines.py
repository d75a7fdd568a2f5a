"""Machines that a run takes: nodes and GPUs of each, from its sizes."""

from __future__ import annotations

from attrs import frozen

from skyrl.config.derive.sizes import GPUS_OF_A_MACHINE
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.kinds import kind_of
from skyrl.errors import UserError
from skyrl.planning.layout import ClusterNode, NoRoom, assign
from skyrl.planning.sizes import layout


@frozen(kw_only=True)
class Need:
    """Machines of one size, as few as hold the run."""

    nodes: int
    per_node: int
    """GPUs, or slots where `device` is cpu."""


def need_of(run: RunConfig, per_node: int | None = None) -> Need:
    """Machines for a resolved run, of `per_node` GPUs each if that is given.

    Raises `UserError` if a machine of `per_node` GPUs is too small.
    """
    sizes = kind_of(run).sizes(run)
    laid = layout(sizes)
    machine = per_node or max(GPUS_OF_A_MACHINE, *(pool.gpus_per_node for pool in laid.pools), 1)
    nodes = [ClusterNode(id=str(number), gpus=machine) for number in range(sum(pool.nodes for pool in laid.pools))]
    try:
        taken = {node for nodes_of_pool in assign(laid, nodes).values() for node in nodes_of_pool}
    except NoRoom as error:
        message = f"{error.pool.name} needs {error.pool.gpus_per_node} GPUs on one node, and a node has {machine}"
        raise UserError(f"{message}: see gpus_per_node of the cluster") from None
    count = max(1, len(taken))
    return Need(nodes=count, per_node=per_node or (machine if count > 1 else max(1, laid.gpus)))
