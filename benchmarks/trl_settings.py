"""Settings of TRL's trainers for a comparison on a CPU: float32, a constant rate, nothing saved or reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAIN: Mapping[str, Any] = {
    "num_train_epochs": 1,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
