"""Roles: the models of a kind of run, where they are in its tree, and what is done with them. Sizes, checks, effects
and tools loop over the roles of a kind.

A reinforcement-learning run has a table for each of its three models; a supervised run has one model, at its root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from attrs import frozen

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.settings.deepspeed import ZeroOptimizationConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.strategies import StrategyFacts, facts_of, reads
from skyrl.planning.topology import Degrees, Grid
from skyrl.tree import get_at, joined

GRID = ("num_nodes", "num_gpus_per_node")
"""Ends of the paths of a model's sizes."""


@frozen(kw_only=True)
class Role:
    """One model of a run. `run` is always a resolved tree."""

    name: str
    """Name of the model among processes and sizes, such as `policy`."""

    path: str
    """Path of the table; empty where it is the root."""

    trainer: str
    """Path of the table with `strategy` and `device`; empty where it is the root."""

    title: str
    """Name of the model in messages."""

    placement: str
    """Beginning of the paths of its sizes, such as `trainer.placement.policy_`."""

    exists: Callable[[Any], bool] = lambda run: True
    """Whether the run has this model."""

    exists_where: str = ""
    """Condition under which the run has this model, in words, such as "there is a critic"; empty for a model that every
    run has."""

    learns: bool = True
    """Whether the model is trained. A reference has neither gradients nor an optimizer."""

    is_sampled_from: bool = False
    """Whether its weights are sent to engines, which sample from it."""

    scores: bool = False
    """Whether it has a head for a score, in place of the tokens' logits."""

    stored_as: str
    """Name of the model in checkpoints."""

    exported_as: str = "model"
    """Name of the folder that the model is exported into."""

    optimizer_steps: Callable[[Any], int] = lambda run: 1
    """Optimizer steps in one training step."""

    def grid(self, run: RunConfig) -> Grid:
        """Nodes and GPUs of the model."""
        nodes, gpus = attrgetter(*(f"{self.placement}{name}" for name in GRID))(run)
        return Grid(nodes=nodes, gpus_per_node=gpus)

    def ranks(self, run: RunConfig) -> int:
        """Number of ranks of the model."""
        return self.grid(run).ranks

    def at(self, field: str) -> str:
        """The path of a field of this model."""
        return joined(self.path, field)

    def section(self, run: Any) -> Any:
        """The model's table, with fields such as `model` and `fsdp_config`."""
        return get_at(run, self.path)

    def on_cuda(self, run: RunConfig) -> bool:
        """Whether the model computes on GPUs."""
        return self.basics(run).device == "cuda"

    def reads(self, run: RunConfig, table: str) -> bool:
        """Whether the strategy reads this table of the model, such as `fsdp_config`."""
        return reads(self.basics(run), table)

    def facts(self, run: RunConfig) -> StrategyFacts:
        """Facts about the strategy that spreads the model over ranks."""
        return facts_of(self.basics(run))

    def degrees(self, run: RunConfig) -> Degrees:
        """Ranks of one replica of the model, by the dimension along which they share it."""
        return self.facts(run).degrees_of(self.section(run))

    def zero(self, run: RunConfig) -> ZeroOptimizationConfig:
        """DeepSpeed's settings for sharding and offloading."""
        settings: ZeroOptimizationConfig = self.section(run).deepspeed_config.zero_optimization
        return settings

    def optimizer_may_leave(self, run: RunConfig) -> bool:
        """Whether the optimizer's state can move off a GPU between phases; False if it is kept elsewhere anyway."""
        if self.reads(run, "fsdp_config"):
            return not (self.section(run).fsdp_config.cpu_offload and self.ranks(run) > 1)
        if not self.reads(run, "deepspeed_config"):
            return True
        zero = self.zero(run)
        offloaded = zero.offload_optimizer.device != "none" or (zero.stage == 3 and zero.offload_param.device != "none")
        return zero.stage > 0 and not offloaded

    def basics(self, run: RunConfig) -> RunBasics:
        """The settings of the run that every kind of run has."""
        settings: RunBasics = get_at(run, self.trainer)
        return settings


def grids_of(run: RunConfig, roles: Iterable[Role]) -> dict[str, Grid]:
    """Name -> nodes and GPUs of each of the roles that the run has."""
    return {role.name: role.grid(run) for role in roles if role.exists(run)}
