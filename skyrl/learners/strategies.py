"""The strategies by the names that `trainer.strategy` has for them. A new one is an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen

from skyrl.config import CriticConfig, PolicyConfig, RefConfig
from skyrl.errors import ConfigError, Problem
from skyrl.learners.fsdp2 import Fsdp2
from skyrl.learners.strategy import ModelSource, Strategy, StrategyContext
from skyrl.learners.zero import Zero

ModelSection = PolicyConfig | CriticConfig | RefConfig
"""One model's part of the configuration, with the settings of every strategy side by side."""


@frozen(kw_only=True)
class StrategyKind:
    """Facts about a strategy that the workers need."""

    start: Callable[[ModelSource, ModelSection, StrategyContext], Strategy]
    """Spreads a model over its ranks, as its section of the configuration says. Collective."""

    joins_alone: bool = False
    """The only rank of a role needs a process group, too."""


_FSDP2 = StrategyKind(start=lambda source, section, context: Fsdp2(source, section.fsdp_config, context))

STRATEGIES: Mapping[str, StrategyKind] = {
    "fsdp": _FSDP2,
    "fsdp2": _FSDP2,
    "deepspeed": StrategyKind(
        start=lambda source, section, context: Zero(source, section.deepspeed_config, context), joins_alone=True
    ),
}


def strategy_named(name: str, field: str = "trainer.strategy") -> StrategyKind:
    """The strategy of this name, which `field` gives. Raises `ConfigError` for one that has no learner."""
    if name not in STRATEGIES:
        message = f"no learner for {name!r}"
        raise ConfigError([Problem(path=field, message=message, hint=f"choose {', '.join(STRATEGIES)}")])
    return STRATEGIES[name]
