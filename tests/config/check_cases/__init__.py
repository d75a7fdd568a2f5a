"""Cases of every check, one module for each of `skyrl.config.checks`."""

from __future__ import annotations

from typing import Any

from tests.config.check_cases import (
    agents,
    algorithm,
    asynchronous,
    batches,
    checkpoints,
    data,
    engines,
    experts,
    learners,
    megatron,
    models,
    placement,
    plausible,
    rollouts,
    sampling,
    sequences,
)

MODULES = (
    agents,
    algorithm,
    asynchronous,
    batches,
    checkpoints,
    data,
    engines,
    experts,
    learners,
    megatron,
    models,
    placement,
    plausible,
    rollouts,
    sampling,
    sequences,
)

FIRES: dict[str, list[tuple[dict[str, Any], str]]] = {}
"""Check -> what is written, and what the one problem is about."""

SILENT: dict[str, dict[str, Any]] = {}
"""Check -> settings near by, on which it is silent."""

for module in MODULES:
    FIRES |= module.FIRES
    SILENT |= module.SILENT

OPTIMIZER = "trainer.policy.optimizer_config."

EDGES: list[tuple[str, dict[str, Any]]] = [
    # further runs on which a check is silent: the last value before it fires, or one of two that do not go together
    ("ratio_cap_reaches_one", {**plausible.RATIOS, plausible.CAP: 1.0}),
    ("learning_rates_suit_fine_tuning", {OPTIMIZER + "lr": 0.5, OPTIMIZER + "optimizer": "sgd"}),
    ("schedules_are_consistent", {OPTIMIZER + "num_warmup_steps": 3}),
    ("schedules_are_consistent", {OPTIMIZER + "warmup_steps_proportion": 0.1}),
]
