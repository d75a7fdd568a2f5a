"""Megatron-core's gradient buffers and optimizer, out of our settings. Importing this needs Megatron-core."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
)
from megatron.core.optimizer import (
    get_megatron_optimizer,
    get_standard_config_overrides,
)

from skyrl.config import MegatronConfig, OptimizerConfig


def is_distributed(optimizer: OptimizerConfig) -> bool:
    """Whether data-parallel ranks have a part each of the optimizer's state. Megatron-core does so for Adam alone."""
    return optimizer.optimizer == "adamw"


def ddp_config(config: MegatronConfig, optimizer: OptimizerConfig) -> Any:
    """How gradients are summed over data-parallel ranks."""
    ours = config.ddp_config
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=ours.grad_reduce_in_fp32,
        overlap_grad_reduce=ours.overlap_grad_reduce,
        overlap_param_gather=ours.overlap_param_gather,
        average_in_collective=ours.average_in_collective,
        use_distributed_optimizer=is_distributed(optimizer),
    )


def make_megatron_optimizer(ddp: Any, megatron: Any, config: MegatronConfig, optimizer: OptimizerConfig) -> Any:
    """Megatron-core's chain of optimizers over the parameters of `ddp` that learn, with our weight decay."""
    beta1, beta2 = optimizer.adam_betas
    settings = MegatronOptimizerConfig(
        **{
            "optimizer": "adam" if optimizer.optimizer == "adamw" else optimizer.optimizer,
            "lr": optimizer.lr,
            "weight_decay": optimizer.weight_decay,
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            "adam_eps": optimizer.adam_eps,
            "sgd_momentum": 0.0,
            "bf16": megatron.params_dtype is torch.bfloat16,
            "fp16": megatron.params_dtype is torch.float16,
            "params_dtype": megatron.params_dtype,
            "use_distributed_optimizer": is_distributed(optimizer),
            "overlap_param_gather": config.ddp_config.overlap_param_gather,
            **config.optimizer_config_kwargs,
        }
    )
    overrides = get_standard_config_overrides(settings) if optimizer.weight_decay_on == "matrices" else {}
    outer = get_megatron_optimizer(settings, [ddp], config_overrides=overrides, use_gloo_process_groups=False)
    for inner in outer.chained_optimizers:
        for group in inner.optimizer.param_groups:  # Megatron-core's own scheduler would do this
            group["weight_decay"] = optimizer.weight_decay * group.get("wd_mult", 1.0)
    return outer
