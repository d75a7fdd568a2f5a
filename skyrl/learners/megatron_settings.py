"""Our settings as Megatron-core's fields. Nothing here needs Megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen

from skyrl.config import MegatronConfig, OptimizerConfig
from skyrl.learners.megatron_package import Degrees


@frozen(kw_only=True)
class MegatronSettings:
    """What one model is spread with."""

    degrees: Degrees

    transformer: Mapping[str, Any]
    """Fields of `TransformerConfig`, besides those that follow from the model."""

    experts: Mapping[str, object]
    """Fields of `TransformerConfig` for a model with experts, besides the others."""

    joins_adapters: bool = True
    """Linear layers that Megatron-core joins have one factor A of their adapters in common."""

    ddp: Mapping[str, Any] | None = None
    """Fields of `DistributedDataParallelConfig`. None, as all below, of a model that never changes."""

    optimizer: Mapping[str, Any] | None = None
    """Fields of `OptimizerConfig`."""

    empties_cache: bool = False
    """Cached GPU memory is given back after every step."""

    @classmethod
    def of(cls, config: MegatronConfig, optimizer: OptimizerConfig | None, dtype: torch.dtype) -> MegatronSettings:
        """Settings out of a model's table, computing in `dtype`."""
        degrees = Degrees.of(config)
        transformer, experts = _transformer(config, degrees), _experts(config, degrees)
        if optimizer is None:
            return cls(degrees=degrees, transformer=transformer, experts=experts)
        return cls(
            degrees=degrees,
            transformer=transformer,
            experts=experts,
            joins_adapters=config.lora_config.lora_type == "lora",
            ddp=_ddp(config, optimizer),
            optimizer=_optimizer(config, optimizer, dtype),
            empties_cache=bool(config.empty_cuda_cache),
        )


def _transformer(config: MegatronConfig, degrees: Degrees) -> dict[str, Any]:
    """Kernels that need Transformer Engine or Apex are off unless they are asked for. TOML says null as a word."""
    asked = {name: None if value == "none" else value for name, value in config.transformer_config_kwargs.items()}
    fusions = ("masked_softmax", "bias_activation", "bias_dropout", "gradient_accumulation")
    return {
        "sequence_parallel": degrees.tensor > 1,
        **{f"{name}_fusion": False for name in fusions},
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        **asked,
    }


def _experts(config: MegatronConfig, degrees: Degrees) -> dict[str, object]:
    return {
        "expert_model_parallel_size": degrees.expert,
        "expert_tensor_parallel_size": degrees.expert_tensor,
        "moe_token_dispatcher_type": config.moe_token_dispatcher_type,
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "moe_router_score_function": config.moe_router_score_function or "softmax",
        "moe_router_enable_expert_bias": bool(config.moe_router_enable_expert_bias),
    }


def _is_distributed(optimizer: OptimizerConfig) -> bool:
    """Whether data-parallel ranks have a part each of the optimizer's state. Megatron-core does so for Adam alone."""
    return optimizer.optimizer == "adamw"


def _ddp(config: MegatronConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    ours = config.ddp_config
    return {
        "grad_reduce_in_fp32": ours.grad_reduce_in_fp32,
        "overlap_grad_reduce": ours.overlap_grad_reduce,
        "overlap_param_gather": ours.overlap_param_gather,
        "average_in_collective": ours.average_in_collective,
        "use_distributed_optimizer": _is_distributed(optimizer),
    }


def _optimizer(config: MegatronConfig, optimizer: OptimizerConfig, dtype: torch.dtype) -> dict[str, Any]:
    beta1, beta2 = optimizer.adam_betas
    return {
        "optimizer": "adam" if optimizer.optimizer == "adamw" else optimizer.optimizer,
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_eps": optimizer.adam_eps,
        "sgd_momentum": 0.0,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": _is_distributed(optimizer),
        "overlap_param_gather": config.ddp_config.overlap_param_gather,
        **config.optimizer_config_kwargs,
    }
