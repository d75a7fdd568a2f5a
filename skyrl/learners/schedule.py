"""How a model is trained, whatever spreads it: the optimizer, its learning rate, and what backward computes again."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from skyrl.config import OptimizerConfig


def adamw(model: Any, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) over the parameters that learn, with the configured decoupled weight decay."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    beta1, beta2 = config.adam_betas
    return torch.optim.AdamW(learning, lr=config.lr, betas=(beta1, beta2), weight_decay=config.weight_decay)


def learning_rate_schedule(optimizer: Optimizer, config: OptimizerConfig, num_training_steps: int | None) -> Any:
    """A torch scheduler that warms up over `num_warmup_steps` optimizer steps and then follows `scheduler`.

    Raises ValueError if the schedule ends somewhere and `num_training_steps` is None.
    """
    from transformers import get_scheduler

    return get_scheduler(
        config.scheduler,
        optimizer,
        num_warmup_steps=config.num_warmup_steps,
        num_training_steps=num_training_steps,
    )


def move_schedule(schedule: Any, optimizer_steps: int) -> None:
    """Continue after `optimizer_steps` steps, at the rate that this schedule has there."""
    schedule.last_epoch = optimizer_steps
    rates = [base * rate(optimizer_steps) for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def recompute_activations(model: Any, *, use_reentrant: bool) -> None:
    """Keep no activations inside a layer and compute them again in the backward pass (arXiv:1604.06174).

    transformers does so in training mode only. Only the layers themselves enter it: what is inside them, dropout above
    all, stays in evaluation mode, where a forward pass can be repeated.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
