"""The strategies, keyed by their names in `trainer.strategy`. A new one is an entry here and, with its facts, in
`skyrl.config.settings.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skyrl.config.settings.learners import ShardedModelConfig
from skyrl.errors import ConfigError, Problem
from skyrl.learners.fsdp2 import Fsdp2
from skyrl.learners.megatron.package import import_megatron
from skyrl.learners.strategy import ModelSource, Strategy, StrategyContext
from skyrl.learners.zero.strategy import Zero

Start = Callable[[ModelSource, ShardedModelConfig, StrategyContext], Strategy]
"""Spreads a model over its ranks, as its section of the configuration says. Collective."""


def _fsdp2(source: ModelSource, section: ShardedModelConfig, context: StrategyContext) -> Strategy:
    return Fsdp2(source, section.fsdp_config, context)


def _megatron(source: ModelSource, section: ShardedModelConfig, context: StrategyContext) -> Strategy:
    megatron: type[Any] = import_megatron("skyrl.learners.megatron.strategy", context.run.path_of("strategy")).Megatron
    started: Strategy = megatron(source, section.megatron_config, context)
    return started


STRATEGIES: Mapping[str, Start] = {
    "fsdp": _fsdp2,
    "fsdp2": _fsdp2,
    "deepspeed": lambda source, section, context: Zero(source, section.deepspeed_config, context),
    "megatron": _megatron,
}


def strategy_named(name: str, field: str = "trainer.strategy") -> Start:
    """The strategy of this name, which `field` gives. Raises `ConfigError` for one that has no learner."""
    if name not in STRATEGIES:
        message = f"no learner for {name!r}"
        raise ConfigError([Problem(path=field, message=message, hint=f"choose {', '.join(STRATEGIES)}")])
    return STRATEGIES[name]
