"""Locations of the models in the tree of each kind of run, so that checks and effects of models are written once.

A reinforcement-learning run has a table for each of its three models; a supervised run has one model, at its root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from skyrl.config.settings.deepspeed import ZeroOptimizationConfig
from skyrl.config.settings.strategies import StrategyFacts, facts_of, reads
from skyrl.planning.topology import Degrees
from skyrl.tree import get_at, joined


@frozen(kw_only=True)
class ModelTable:
    """The table of one model in a tree. `run` is always a resolved tree."""

    path: str
    """Path of the table; empty where it is the root."""

    trainer: str
    """Path of the table with `strategy` and `device`; empty where it is the root."""

    title: str
    """Name of the model in messages."""

    ranks: Callable[[Any], int]
    """Number of ranks of the model."""

    exists: Callable[[Any], bool] = lambda run: True
    """Whether the run has this model."""

    exists_where: str = ""
    """Condition under which the run has this model, in words, such as "there is a critic"; empty for a model that every
    run has."""

    learns: bool = True
    """Whether the model is trained. A reference has neither gradients nor an optimizer."""

    updates: Callable[[Any], int] = lambda run: 1
    """Optimizer steps in one training step."""

    def at(self, field: str) -> str:
        """The path of a field of this model."""
        return joined(self.path, field)

    def section(self, run: Any) -> Any:
        """The model's table, with fields such as `model` and `fsdp_config`."""
        return get_at(run, self.path) if self.path else run

    def on_cuda(self, run: Any) -> bool:
        """Whether the model computes on GPUs."""
        return bool(self._trainer(run).device == "cuda")

    def reads(self, run: Any, table: str) -> bool:
        """Whether the strategy reads this table of the model, such as `fsdp_config`."""
        return reads(self._trainer(run), table)

    def facts(self, run: Any) -> StrategyFacts:
        """Facts about the strategy that spreads the model over ranks."""
        return facts_of(self._trainer(run))

    def degrees(self, run: Any) -> Degrees:
        """Ranks of one replica of the model, by the dimension along which they share it."""
        return self.facts(run).degrees_of(self.section(run))

    def zero(self, run: Any) -> ZeroOptimizationConfig:
        """DeepSpeed's settings for sharding and offloading."""
        settings: ZeroOptimizationConfig = self.section(run).deepspeed_config.zero_optimization
        return settings

    def optimizer_may_leave(self, run: Any) -> bool:
        """Whether the optimizer's state can move off a GPU between phases; False if it is kept elsewhere anyway."""
        if self.reads(run, "fsdp_config"):
            return not (self.section(run).fsdp_config.cpu_offload and self.ranks(run) > 1)
        if not self.reads(run, "deepspeed_config"):
            return True
        zero = self.zero(run)
        offloaded = zero.offload_optimizer.device != "none" or (zero.stage == 3 and zero.offload_param.device != "none")
        return zero.stage > 0 and not offloaded

    def _trainer(self, run: Any) -> Any:
        return get_at(run, self.trainer) if self.trainer else run
