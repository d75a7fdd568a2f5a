"""The strategies, keyed by their names in `trainer.strategy`. A new strategy is added as an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from skyrl.config import CriticConfig, PolicyConfig, RefConfig
from skyrl.errors import ConfigError, Problem
from skyrl.learners.fsdp2 import Fsdp2
from skyrl.learners.megatron.package import import_megatron
from skyrl.learners.strategy import ModelSource, Strategy, StrategyContext
from skyrl.learners.zero.strategy import Zero

ModelSection = PolicyConfig | CriticConfig | RefConfig
"""One model's part of the configuration, with the settings of every strategy side by side."""


@frozen(kw_only=True)
class RowSizes:
    """Ranks along the dimensions in which they share rows: sequence, context and tensor parallel."""

    sequence: int = 1
    context: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, section: ModelSection) -> RowSizes:
        """Sizes from the fields of the model's section."""
        return cls(
            sequence=section.sequence_parallel_size,
            context=section.context_parallel_size,
            tensor=section.tensor_parallel_size,
        )

    @classmethod
    def of_megatron(cls, section: ModelSection) -> RowSizes:
        """Sizes from the table `megatron_config` of the model's section."""
        config = section.megatron_config
        return cls(context=config.context_parallel_size, tensor=config.tensor_model_parallel_size)


@frozen(kw_only=True)
class StrategyKind:
    """Facts about a strategy that the workers need."""

    start: Callable[[ModelSource, ModelSection, StrategyContext], Strategy]
    """Spreads a model over its ranks, as its section of the configuration says. Collective."""

    joins_alone: bool = False
    """Whether the strategy needs a process group even for a single rank."""

    own_modules: bool = False
    """Whether the strategy replaces transformers' modules by its own."""

    recomputes: bool = False
    """Whether the strategy has its own settings for activation recomputation."""

    sizes: Callable[[ModelSection], RowSizes] = RowSizes.of
    """Ranks that compute on the same rows."""


def _megatron(source: ModelSource, section: ModelSection, context: StrategyContext) -> Strategy:
    megatron: type[Any] = import_megatron("skyrl.learners.megatron.strategy", context.strategy_field).Megatron
    started: Strategy = megatron(source, section.megatron_config, context)
    return started


_FSDP2 = StrategyKind(start=lambda source, section, context: Fsdp2(source, section.fsdp_config, context))

STRATEGIES: Mapping[str, StrategyKind] = {
    "fsdp": _FSDP2,
    "fsdp2": _FSDP2,
    "deepspeed": StrategyKind(
        start=lambda source, section, context: Zero(source, section.deepspeed_config, context), joins_alone=True
    ),
    "megatron": StrategyKind(
        start=_megatron, joins_alone=True, own_modules=True, recomputes=True, sizes=RowSizes.of_megatron
    ),
}


def strategy_named(name: str, field: str = "trainer.strategy") -> StrategyKind:
    """The strategy of this name, which `field` gives. Raises `ConfigError` for one that has no learner."""
    if name not in STRATEGIES:
        message = f"no learner for {name!r}"
        raise ConfigError([Problem(path=field, message=message, hint=f"choose {', '.join(STRATEGIES)}")])
    return STRATEGIES[name]
