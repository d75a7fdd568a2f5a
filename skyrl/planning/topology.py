"""The number of a run's processes and their sizes; `layout.py` places them on GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

MOST_PROCESSES = 2**17
"""Largest number of ranks and engines' GPUs of one run that is laid out: more than the largest clusters have."""


@frozen(kw_only=True)
class Grid:
    """Ranks of one model, one on each GPU: `nodes` machines with `gpus_per_node` each."""

    nodes: int
    gpus_per_node: int

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.gpus_per_node


@frozen(kw_only=True)
class Degrees:
    """Ranks of a model by the dimension along which they share it, whatever the strategy."""

    data: int = 1
    """Ranks, or groups of ranks, that get rows of their own."""

    pipeline: int = 1
    """Ranks that each hold a run of layers."""

    context: int = 1
    """Ranks that share a sequence and gather its keys and values."""

    sequence: int = 1
    """Ranks that exchange heads for parts of a sequence (Ulysses, arXiv:2309.14509)."""

    tensor: int = 1
    """Ranks that split matrices."""

    expert: int = 1
    """Ranks that hold different experts; they are also counted in the other dimensions."""

    expert_tensor: int = 1
    """Ranks that split the matrices of each expert."""

    @property
    def inner(self) -> int:
        """Ranks of one pipeline stage that compute on the same rows."""
        return self.context * self.sequence * self.tensor

    @property
    def replica(self) -> int:
        """Ranks that compute on the same rows: those of all pipeline stages."""
        return self.pipeline * self.inner

    @property
    def experts(self) -> int:
        """Ranks that together hold all experts of a layer."""
        return self.expert * self.expert_tensor

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.replica


@frozen(kw_only=True)
class EngineSizes:
    """Inference engines, all of one size."""

    number: int
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    on_one_node: bool = False
    """Whether the processes of an engine are children of one process, and therefore all on its machine."""

    @property
    def gpus(self) -> int:
        """Number of GPUs of one engine."""
        return self.tensor * self.pipeline * self.data


@frozen(kw_only=True)
class Sizes:
    """The number of a run's processes and their sizes."""

    models: Mapping[str, Grid]
    """Role -> ranks of the models that are trained or that score."""

    engines: EngineSizes | None = None
    colocate_all: bool = True
    colocate_policy_ref: bool = True
    gpus_per_node: int = 8
    """Number of GPUs of one machine, which determines over how many machines an engine with separate GPUs is spread."""

    @property
    def processes(self) -> int:
        """Number of ranks of all models, and of GPUs of all engines."""
        engines = self.engines.number * self.engines.gpus if self.engines else 0
        return engines + sum(grid.ranks for grid in self.models.values())
