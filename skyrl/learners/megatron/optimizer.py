"""Builds Megatron-core's optimizer from our settings. Importing this module requires Megatron-core."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from skyrl.config import OptimizerConfig
from skyrl.errors import ModelError
from skyrl.learners.megatron.settings import MegatronSettings


def make_megatron_optimizer(
    ddp: DistributedDataParallel, settings: MegatronSettings, optimizer: OptimizerConfig, *, field: str
) -> ChainedOptimizer:
    """Megatron-core's chain of optimizers over the parameters of `ddp` that learn, with our weight decay. Raises
    `ModelError`, which names `field`, for settings that Megatron-core does not have.
    """
    try:
        ours = MegatronOptimizerConfig(**settings.optimizer or {})
    except TypeError as error:
        raise ModelError(f"{field}: Megatron-core's OptimizerConfig does not take it: {error}") from error
    overrides = get_standard_config_overrides(ours) if optimizer.weight_decay_on == "matrices" else {}
    outer = get_megatron_optimizer(ours, [ddp], config_overrides=overrides, use_gloo_process_groups=False)
    for inner in outer.chained_optimizers:
        for group in inner.optimizer.param_groups:  # Megatron-core's own scheduler would do this
            group["weight_decay"] = optimizer.weight_decay * group.get("wd_mult", 1.0)
    return outer
