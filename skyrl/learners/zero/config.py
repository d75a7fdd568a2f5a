"""Translates our settings to DeepSpeed's configuration dictionary. Those of ZeRO have DeepSpeed's names already."""

from __future__ import annotations

import sys
from typing import Any

import torch

from skyrl.config import DeepSpeedConfig, OptimizerConfig
from skyrl.config.settings.deepspeed import OffloadConfig, ZeroOptimizationConfig
from skyrl.tree.classes import fields_of

SHORT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Type -> its short name, the only one that DeepSpeed accepts."""


def engine_config(
    config: DeepSpeedConfig,
    optimizer: OptimizerConfig | None,
    *,
    compute_dtype: torch.dtype,
    micro_batch_rows: int,
    device: torch.device,
) -> dict[str, Any]:
    """The configuration of `deepspeed.initialize` for one model; `optimizer` is None for a model that never changes.

    Sizes that are `"auto"` are left out, so that DeepSpeed's defaults apply. `gradient_clipping` comes from
    `optimizer_config.max_grad_norm`; 0 disables clipping in DeepSpeed, too. Stage 0 shards nothing and keeps its
    weights in float32: it computes under autocast and clips as a single process does.
    """
    stage = config.zero_optimization.stage
    clipping = optimizer.max_grad_norm if optimizer and stage else 0.0
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_rows,
        "gradient_accumulation_steps": 1,  # each micro-batch says whether its mini-batch ends
        "steps_per_print": sys.maxsize,
        "zero_optimization": _zero(config.zero_optimization, device),
        "zero_allow_untested_optimizer": True,  # the optimizer is torch's, as under every strategy
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": config.gradient_clipping or clipping,
        "bf16": {"enabled": compute_dtype is torch.bfloat16 and stage > 0},
        "prescale_gradients": config.prescale_gradients,
        "wall_clock_breakdown": config.wall_clock_breakdown,
    }
    if config.communication_data_type is not None:
        dtype = config.communication_data_type
        settings["communication_data_type"] = SHORT_NAMES.get(dtype, dtype)
    return settings


def _zero(zero: ZeroOptimizationConfig, device: torch.device) -> dict[str, Any]:
    settings = {name: getattr(zero, name) for name in fields_of(ZeroOptimizationConfig)}
    settings = {name: value for name, value in settings.items() if not isinstance(value, OffloadConfig | str)}
    if zero.offload_param.device != "none" and zero.stage == 3:
        settings["offload_param"] = _offload(zero.offload_param, device)
    if zero.offload_optimizer.device != "none" and zero.stage > 0:
        settings["offload_optimizer"] = _offload(zero.offload_optimizer, device)
    return settings


def _offload(offload: OffloadConfig, device: torch.device) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "device": offload.device,
        "pin_memory": offload.pin_memory and device.type == "cuda",  # pinning only speeds up copies to a GPU
    }
    return settings | ({"nvme_path": offload.nvme_path} if offload.nvme_path else {})
