"""Values of a model's own Hugging Face configuration that a run replaces, in learners and engines alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.trainer import TrainerConfig


def learner_overrides(trainer: TrainerConfig, model: str) -> Mapping[str, Any]:
    """Values by name for `policy`, `critic` or `ref`; `rope_scaling` and `rope_theta` apply to all models."""
    return _with_rope(_own(trainer, model), trainer.rope_scaling, trainer.rope_theta)


def engine_overrides(run: SkyRLTrainConfig) -> Mapping[str, Any]:
    """Values by name for the engines: those of the policy. The tree must have passed `check`."""
    return _with_rope(_own(run.trainer, "policy"), run.generator.rope_scaling, run.generator.rope_theta)


def _own(trainer: TrainerConfig, model: str) -> Mapping[str, Any]:
    """Values from the model's own table, or under Megatron from its `megatron_config`."""
    section = getattr(trainer, model)
    is_megatrons = trainer.strategy == "megatron"
    own: Mapping[str, Any] = (
        section.megatron_config.model_config_kwargs if is_megatrons else section.model_config_kwargs
    )
    return own


def _with_rope(own: Mapping[str, Any], scaling: Mapping[str, Any] | None, theta: float | None) -> dict[str, Any]:
    rope = {"rope_scaling": scaling, "rope_theta": theta}
    return {**own, **{name: value for name, value in rope.items() if value is not None}}
