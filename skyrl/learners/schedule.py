"""The learning rate over optimizer steps, by the schedule names of transformers."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from skyrl.config import OptimizerConfig


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
