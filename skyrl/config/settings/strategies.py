"""Facts about the strategies that spread a model over ranks. No other module compares the name of a strategy.

A strategy is a line of `STRATEGIES`; the code that spreads a model is the line of the same name in
`skyrl.learners.workers.strategies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from attrs import evolve, frozen

from skyrl.config.settings.run_basics import RunBasics
from skyrl.planning.topology import Degrees


@frozen(kw_only=True)
class StrategyFacts:
    """Facts about a strategy: what it reads, shards and supports. Paths of fields are below the table of a model."""

    table: str
    """The model's table with the settings of this strategy alone."""

    degrees: Mapping[str, str]
    """Dimension, as in `Degrees` -> the field with the number of ranks along it. The others are always 1."""

    package: str | None = None
    """The package that the strategy imports, which is also the extra that installs it. None: torch alone."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    """Devices that it computes on."""

    overrides: str = "model_config_kwargs"
    """Replaced values of the model's own configuration."""

    recomputation: str | None = None
    """Table with settings for activation recomputation. None: `recompute_activations` of the run decides."""

    on_host: Mapping[str, object]
    """Fields -> values that keep states in host memory all the time; empty if it cannot."""

    weights_on_host: bool = False
    """Whether `on_host` moves the weights too, and so acts on models that do not learn."""

    joins_alone: bool = False
    """Whether it needs a process group even for a single rank."""

    own_modules: bool = False
    """Whether it computes by modules of its own, not by those of transformers."""

    cuts_shards: bool = False
    """Whether weights may be cut along the tensor dimension and sharded at once, at every stage of sharding."""

    shards_parts: str | None = None
    """Field with the number of ranks that share one copy of the weights; None if all ranks share them."""

    same_as: str | None = None
    """The name that the same strategy is listed under, for an older name."""

    compiles: bool = False
    """Whether layers may be compiled on a GPU."""

    def degrees_of(self, section: object) -> Degrees:
        """Degrees from the table of a model. `expert_tensor` of None stands for the tensor size."""
        sizes = {name: attrgetter(path)(section) for name, path in self.degrees.items()}
        if "expert_tensor" in sizes:
            sizes["expert_tensor"] = sizes["expert_tensor"] or sizes["tensor"]
        return Degrees(**sizes)


_SHARED_ROWS = {name: f"{name}_parallel_size" for name in ("sequence", "context", "tensor")}

_FSDP2 = StrategyFacts(
    table="fsdp_config",
    degrees={**_SHARED_ROWS, "expert": "expert_parallel_size"},
    on_host={"fsdp_config.cpu_offload": True},
    weights_on_host=True,
    cuts_shards=True,
    shards_parts="fsdp_config.fsdp_size",
    compiles=True,
)

STRATEGIES: Mapping[str, StrategyFacts] = {
    "fsdp": evolve(_FSDP2, same_as="fsdp2"),
    "fsdp2": _FSDP2,
    "deepspeed": StrategyFacts(
        table="deepspeed_config",
        degrees=_SHARED_ROWS,
        package="deepspeed",
        on_host={"deepspeed_config.zero_optimization.offload_optimizer.device": "cpu"},
        joins_alone=True,
    ),
    "megatron": StrategyFacts(
        table="megatron_config",
        degrees={
            "pipeline": "megatron_config.pipeline_model_parallel_size",
            "context": "megatron_config.context_parallel_size",
            "tensor": "megatron_config.tensor_model_parallel_size",
            "expert": "megatron_config.expert_model_parallel_size",
            "expert_tensor": "megatron_config.expert_tensor_parallel_size",
        },
        package="megatron",
        devices=("cuda",),
        overrides="megatron_config.model_config_kwargs",
        recomputation="megatron_config.transformer_config_kwargs",
        on_host={},
        joins_alone=True,
        own_modules=True,
    ),
}
"""Name in `strategy` -> its facts. `fsdp` and `fsdp2` are one."""


def has_own_modules(name: object) -> bool:
    """Whether `name`, in this project's or another one's files, is a strategy that computes by modules of its own."""
    return isinstance(name, str) and name in STRATEGIES and STRATEGIES[name].own_modules


def facts_of(run: RunBasics) -> StrategyFacts:
    """Facts about the strategy that a run chooses."""
    return STRATEGIES[run.strategy]


def reads(run: RunBasics, table: str) -> bool:
    """Whether the strategy of a run reads this table of a model, such as `fsdp_config`."""
    return facts_of(run).table == table
