"""Translates our settings to Megatron-core's fields. Nothing here requires Megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen

from skyrl.config import MegatronConfig, OptimizerConfig
from skyrl.planning.topology import Degrees


@frozen(kw_only=True)
class MegatronSettings:
    """Megatron-core's settings for one model."""

    degrees: Degrees

    transformer: Mapping[str, Any]
    """Fields of `TransformerConfig` that do not follow from the model."""

    experts: Mapping[str, object]
    """Further fields of `TransformerConfig` for a model with experts."""

    joins_adapters: bool = True
    """Whether linear layers that Megatron-core joins share the factor A of their adapters."""

    ddp: Mapping[str, Any] | None = None
    """Fields of `DistributedDataParallelConfig`. None for a model that never changes, as for the fields below."""

    optimizer: Mapping[str, Any] | None = None
    """Fields of `OptimizerConfig`."""

    empties_cache: bool = False
    """Whether cached GPU memory is released after every step."""

    @classmethod
    def of(
        cls, config: MegatronConfig, degrees: Degrees, optimizer: OptimizerConfig | None, dtype: torch.dtype
    ) -> MegatronSettings:
        """Settings from a model's table of the configuration, for computing in `dtype`."""
        fusions = ("masked_softmax", "bias_activation", "bias_dropout", "gradient_accumulation")
        kwargs = config.transformer_config_kwargs
        transformer = {
            "sequence_parallel": degrees.tensor > 1,
            # kernels that need Transformer Engine or Apex are off unless requested
            **{f"{name}_fusion": False for name in fusions},
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            **{name: None if value == "none" else value for name, value in kwargs.items()},  # TOML has no null
        }
        experts = {
            "expert_model_parallel_size": degrees.expert,
            "expert_tensor_parallel_size": degrees.expert_tensor,
            "moe_token_dispatcher_type": config.moe_token_dispatcher_type,
            "moe_router_load_balancing_type": config.moe_router_load_balancing_type,
            "moe_grouped_gemm": config.moe_grouped_gemm,
            "moe_router_score_function": config.moe_router_score_function or "softmax",
            "moe_router_enable_expert_bias": bool(config.moe_router_enable_expert_bias),
        }
        if optimizer is None:
            return cls(degrees=degrees, transformer=transformer, experts=experts)
        ours, (beta1, beta2) = config.ddp_config, optimizer.adam_betas
        # Megatron-core shards the optimizer's state over data-parallel ranks for Adam alone
        sharded = optimizer.optimizer == "adamw"
        return cls(
            degrees=degrees,
            transformer=transformer,
            experts=experts,
            joins_adapters=config.lora_config.lora_type == "lora",
            ddp={
                "grad_reduce_in_fp32": ours.grad_reduce_in_fp32,
                "overlap_grad_reduce": ours.overlap_grad_reduce,
                "overlap_param_gather": ours.overlap_param_gather,
                "average_in_collective": ours.average_in_collective,
                "use_distributed_optimizer": sharded,
            },
            optimizer={
                "optimizer": "adam" if sharded else optimizer.optimizer,
                "lr": optimizer.lr,
                "weight_decay": optimizer.weight_decay,
                "adam_beta1": beta1,
                "adam_beta2": beta2,
                "adam_eps": optimizer.adam_eps,
                "sgd_momentum": 0.0,
                "bf16": dtype is torch.bfloat16,
                "params_dtype": dtype,
                "use_distributed_optimizer": sharded,
                "overlap_param_gather": ours.overlap_param_gather,
                **config.optimizer_config_kwargs,
            },
            empties_cache=bool(config.empty_cuda_cache),
        )
